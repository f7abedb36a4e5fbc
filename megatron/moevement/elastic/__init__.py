"""Elastic jobs on Megatron, which continue with fewer ranks when nodes fail, and grow again."""
