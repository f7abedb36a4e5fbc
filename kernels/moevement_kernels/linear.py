"""Weight gradients of a grouped linear layer, computed for active experts only.

The layer computes its outputs and its input gradients by itself, with any kernels. It runs as if all its weights were
frozen. So frozen and active experts take the same path through it, and a backward pass with some frozen experts has the
bits of one with only active experts. The gradient ``dy^T x`` of each active expert then follows from the layer's input
and the gradient of its output. Inputs of frozen experts are not kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moevement_kernels import launch
from moevement_kernels.main_grad import gradients_of


class _WeightGradients(torch.autograd.Function):
    """Autograd function that returns the layer's output; its backward pass computes weight gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.counts = counts
        ctx.active = [expert for expert, needs in enumerate(ctx.needs_input_grad[3:]) if needs]
        rows = x.split(counts)
        kept = x if len(ctx.active) == len(counts) else torch.cat([x[:0], *(rows[expert] for expert in ctx.active)])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept, *(weights[expert] for expert in ctx.active))
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (dy,) = gradients
        wanted: list[Tensor | None] = [None] * len(ctx.counts)
        if dy is None:  # no result of the layer was used
            return None, None, None, *wanted
        x, *weights = ctx.saved_tensors

        def compute(into: list[Tensor], accumulate: bool) -> None:
            targets: list[Tensor | None] = [None] * len(ctx.counts)
            for expert, target in zip(ctx.active, into, strict=True):
                targets[expert] = target
            launch.linear_weight_gradient(dy, x, ctx.counts, targets, accumulate=accumulate)

        for expert, gradient in zip(ctx.active, gradients_of(weights, compute), strict=True):
            wanted[expert] = gradient
        return dy, None, None, *wanted


def with_weight_gradients(y: Tensor, x: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Return ``y``, whose backward pass also computes the gradients of active weights.

    Weights that require no gradient belong to frozen experts; they get none. If all other weights set
    ``fuse_weight_gradient``, their gradients are added to their FP32 ``main_grad``.

    Args:
        y: outputs ``[T, rows]`` of a layer that has treated its weights as constants.
        x: inputs ``[T, columns]`` of the layer, sorted by expert; BF16, FP16 or FP32, as ``y``.
        counts: tokens of each expert.
        weights: ``[rows, columns]`` of each expert.

    Raises:
        ValueError: shapes or dtypes do not fit; raised by the backward pass.
    """
    if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in weights):
        return y
    return _WeightGradients.apply(y, x.detach(), list(counts), *weights)
