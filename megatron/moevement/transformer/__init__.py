"""Replacements for parts of Megatron's transformer."""
