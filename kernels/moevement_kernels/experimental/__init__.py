"""Kernels that no trainer calls, kept until a GPU has shown whether they are faster than the kernels in use.

The kernels compute FP8 products for frozen experts. A CPU cannot show whether they are faster, and no GPU of compute
capability 9.0 has run them yet (docs/gpu.md).
"""
