"""Kernels in CUDA C++. A process builds a kernel when it first uses it."""
