"""Kernels for frozen-mode backward: input gradients alone, and what goes with them.

Each comes as a slow obvious reference in PyTorch, which is its specification, a Triton kernel, and a launcher that
checks shapes and picks one of them: the kernel where the tensors are on a GPU, the reference elsewhere. Nothing here
knows Megatron or the engine.

Letters in names of tensors: T tokens (sorted by expert), E experts, H hidden size, F hidden size of an expert, G the
rows of the first weight: 2F for gated activations, the gate above the linear half, else F.
"""
