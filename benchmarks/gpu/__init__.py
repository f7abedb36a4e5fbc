"""Checks that only a GPU can settle, as one command: ``python -m benchmarks.gpu``."""
