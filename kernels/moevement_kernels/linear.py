"""Weight gradients of a grouped linear layer, computed for active experts only.

The layer, for example Transformer Engine's, computes outputs and input gradients with its own kernels. It treats all
its weights as frozen. So frozen and active experts take the same path, and a backward pass with some frozen experts
gives the same bits as one with only active experts. This module then computes the weight gradient ``dy^T x`` of each
active expert from the layer's input and the gradient of its output. It keeps no inputs of frozen experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moevement_kernels import launch
from moevement_kernels.main_grad import gradients_of


class _WeightGradients(torch.autograd.Function):
    """Autograd function that returns the layer's output unchanged; its backward pass computes weight gradients."""

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
    """Return ``y``, connected to autograd so that its backward pass also computes the weight gradients.

    Weights that require no gradient belong to frozen experts, and get no gradient. If all other weights set
    ``fuse_weight_gradient``, the backward pass adds their gradients to their FP32 ``main_grad``.

    Args:
        y: outputs ``[T, rows]`` of a layer that has treated its weights as constants.
        x: inputs ``[T, columns]`` of the layer, sorted by expert; BF16, FP16 or FP32, the dtype of ``y``.
        counts: tokens of each expert.
        weights: ``[rows, columns]`` of each expert.

    Raises:
        ValueError: shapes or dtypes do not fit; raised by the backward pass.
    """
    if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in weights):
        return y
    return _WeightGradients.apply(y, x.detach(), list(counts), *weights)
