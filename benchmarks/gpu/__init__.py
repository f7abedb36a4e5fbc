"""Checks that only a GPU can settle, in one call: ``python -m benchmarks.gpu``."""
