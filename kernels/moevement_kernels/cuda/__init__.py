"""Kernels in CUDA C++, built when they are first used."""
