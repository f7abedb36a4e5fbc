"""Kernels on a GPU: are they right, and how fast."""
