"""What this fork adds around Megatron's optimizers."""
