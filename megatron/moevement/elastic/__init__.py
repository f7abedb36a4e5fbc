"""Elastic jobs on Megatron: with fewer ranks where some are lost for good, and with more again."""
