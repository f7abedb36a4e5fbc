"""FP8 training without Transformer Engine: what its recipes compute, in plain torch, behind Megatron's own flags.

The numbers and the state are those of the recipes: which values get which codes and scales, when scales change, what is
reduced over which ranks. Products are of dequantised values in FP32, so sums are in this machine's order and not in a
tensor core's. On a GPU nothing of this is used.

- :mod:`formats`: matrices in FP8 and the scales of each recipe.
- :mod:`recipe`: which quantiser a recipe has for inputs, weights and gradients.
- :mod:`delayed`: scales from earlier amaxes.
- :mod:`autocast`: the part of a forward pass that runs in FP8, and its recomputation.
- :mod:`linear`: the product, and Megatron's linear layers that run it.
- :mod:`install`: the names of Megatron behind which all this stands.
"""
