"""Megatron's transformer parts, where this fork needs its own."""
