"""What only a GPU can settle, checked in one call: ``python -m benchmarks.gpu``."""
