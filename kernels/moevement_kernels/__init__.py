"""Kernels for layers with frozen and active experts. The backward pass computes no weight gradients of frozen experts.

Each operation has three parts: a slow and simple reference in PyTorch as the specification, a Triton kernel, and a
launcher. The launcher checks shapes, and runs the kernel on a GPU and the reference elsewhere. The package depends
neither on Megatron nor on the engine.

Letters in names of tensors: T tokens (sorted by expert), E experts, H hidden size, F hidden size of an expert, G rows
of the first weight. G is 2F for gated activations, with the gate above the linear half, and F for all others.
"""
