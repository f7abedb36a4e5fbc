"""Binding to the trainer of Megatron-Bridge, on the same pieces as the binding to Megatron-LM's trainer."""
