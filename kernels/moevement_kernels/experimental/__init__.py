"""Kernels that no trainer calls, kept until a GPU has shown whether they are faster than the kernels in use.

They are FP8 products for frozen experts. Measurements on CPUs cannot show whether these pay, and no GPU of compute
capability 9.0 has run them yet (docs/gpu.md).
"""
