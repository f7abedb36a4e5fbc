"""FP8 training without Transformer Engine: the same recipes in plain torch, behind Megatron's own flags.

Codes, scales, the times at which scales change, and the reductions over ranks follow Transformer Engine's recipes.
Products use dequantised values in FP32, so sums have torch's order and not the order of a tensor core. On a GPU this
package is not used.

- :mod:`formats`: matrices in FP8 and the scales of each recipe.
- :mod:`recipe`: the quantiser that a recipe uses for inputs, weights and gradients.
- :mod:`delayed`: scales from earlier amaxes.
- :mod:`autocast`: the region of a forward pass that runs in FP8, and its recomputation.
- :mod:`linear`: the product, and Megatron's linear layers that use it.
- :mod:`tensor`, :mod:`shards`: weights that are kept in FP8.
- :mod:`adam`: an optimizer whose state has narrow formats.
- :mod:`install`: the names of Megatron that this package replaces.
- :mod:`interrupted`: cleanup of Transformer Engine's FP8 after an interruption.
"""
