"""Extensions of Megatron's optimizers."""
