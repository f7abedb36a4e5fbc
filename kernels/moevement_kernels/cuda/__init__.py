"""Kernels in CUDA C++, which are built when they are first used."""
