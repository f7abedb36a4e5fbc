"""Kernels for the backward pass of frozen and mixed experts, which computes only the gradients that are needed.

Each kernel has a slow and simple reference in PyTorch, which is its specification, a Triton kernel, and a launcher. The
launcher checks shapes, and runs the kernel on a GPU and the reference elsewhere. The package knows neither Megatron nor
the engine.

Letters in names of tensors: T tokens (sorted by expert), E experts, H hidden size, F hidden size of an expert, G rows
of the first weight. G is 2F for gated activations, with the gate above the linear half, and F for all others.
"""
