"""Elastic jobs on Megatron. They continue with fewer ranks when nodes fail, and grow when spare nodes are available."""
