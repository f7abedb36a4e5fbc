"""Checks and timings of the kernels on a GPU."""
