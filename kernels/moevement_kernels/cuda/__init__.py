"""Kernels in CUDA C++. A kernel is built when it is first used."""
