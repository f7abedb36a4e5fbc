"""Kernels that no trainer calls. They stay until a GPU has shown whether they are faster than those that are in use.

FP8 products for frozen experts: on processors nothing can say whether they pay, and no GPU of compute capability 9.0
has run them yet (docs/gpu.md).
"""
