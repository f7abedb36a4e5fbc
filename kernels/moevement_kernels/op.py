"""Grouped expert MLP as a torch operator that computes weight gradients only for active experts.

An expert is active if its weights require gradients when the forward pass runs. Frozen and active experts use the same
kernels on the same tiles for the forward pass and the input gradient. So a backward pass with some frozen experts gives
the same bits as one with only active experts. The operator saves for the backward pass:

    h, p            always
    x               only the rows of active experts
    a               never: the backward pass computes it once, from h, for active experts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moevement_kernels import launch
from moevement_kernels.activations import Activation
from moevement_kernels.main_grad import gradients_of
from moevement_kernels.weights import Weights


@torch.library.custom_op("moevement::grouped_mlp", mutates_args=())
def _forward(
    x: Tensor, p: Tensor, counts: Sequence[int], w1: Sequence[Tensor], w2: Sequence[Tensor], kind: str
) -> tuple[Tensor, Tensor]:
    result = launch.forward(x.contiguous(), p.contiguous(), counts, Weights(w1), Weights(w2), Activation(kind))
    return result.y, result.h


@_forward.register_fake
def _(
    x: Tensor, p: Tensor, counts: Sequence[int], w1: Sequence[Tensor], w2: Sequence[Tensor], kind: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], w1[0].shape[0])


@torch.library.custom_op("moevement::grouped_mlp_input_gradient", mutates_args=())
def _input_gradient(
    dy: Tensor,
    h: Tensor,
    p: Tensor,
    counts: Sequence[int],
    active: Sequence[int],
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the fields of :class:`reference.InputGradient`: ``dx``, ``dp``, ``dh``, and ``a`` of active experts."""
    are_active = [expert in active for expert in range(len(counts))]
    gradients = launch.input_gradient(
        dy.contiguous(), h, p.contiguous(), counts, Weights(w1), Weights(w2), Activation(kind), are_active
    )  # fmt: skip
    return gradients.dx, gradients.dp, gradients.dh, gradients.a


@_input_gradient.register_fake
def _(
    dy: Tensor,
    h: Tensor,
    p: Tensor,
    counts: Sequence[int],
    active: Sequence[int],
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = h.new_empty(sum(counts[expert] for expert in active), w2[0].shape[1])
    return torch.empty_like(dy), p.new_empty(p.shape, dtype=torch.float32), torch.empty_like(h), a


@torch.library.custom_op("moevement::grouped_mlp_weight_gradient", mutates_args=("into1", "into2"))
def _weight_gradient(
    dy: Tensor,
    dh: Tensor,
    x: Tensor,
    a: Tensor,
    counts: Sequence[int],
    active: Sequence[int],
    into1: Sequence[Tensor],
    into2: Sequence[Tensor],
    accumulate: bool,
) -> None:
    """Compute the weight gradients of the experts ``active``; ``into1`` and ``into2`` have a tensor for each one."""
    first: list[Tensor | None] = [None] * len(counts)
    second: list[Tensor | None] = [None] * len(counts)
    for expert, target1, target2 in zip(active, into1, into2, strict=True):
        first[expert], second[expert] = target1, target2
    launch.weight_gradient(dy, dh, x, a, counts, (first, second), accumulate)


@_weight_gradient.register_fake
def _(*args: Any) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, p, counts, w1, w2, kind = inputs
    ctx.counts, ctx.kind = list(counts), kind
    ctx.active = [expert for expert, weight in enumerate(w1) if weight.requires_grad]
    torn = [
        expert
        for expert, (weight1, weight2) in enumerate(zip(w1, w2, strict=True))
        if weight1.requires_grad != weight2.requires_grad
    ]
    if torn:
        raise ValueError(
            f"in experts {torn}, one weight requires a gradient and the other does not; freeze both weights or none"
        )
    kept = (
        x if len(ctx.active) == len(w1) else torch.cat([x[:0], *(x.split(ctx.counts)[expert] for expert in ctx.active)])
    )
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # otherwise the gradient of h would be a tensor of zeros
    ctx.save_for_backward(kept, p, output[1], *w1, *w2)


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dy is None:  # no result of the call was used
        return None, None, None, [None] * len(ctx.counts), [None] * len(ctx.counts), None
    x, p, h, *weights = ctx.saved_tensors
    w1, w2 = weights[: len(ctx.counts)], weights[len(ctx.counts) :]
    dx, dp, dh, a = _input_gradient(dy, h, p, ctx.counts, ctx.active, w1, w2, ctx.kind)
    d1, d2 = _weight_gradients(ctx, (dy, dh, x, a), w1, w2)
    return dx, dp.to(p.dtype), None, d1, d2, None


def _weight_gradients(
    ctx: Any, tensors: tuple[Tensor, ...], w1: list[Tensor], w2: list[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of W1 and W2 for autograd, by expert; None for each frozen expert."""
    gradients: tuple[list[Tensor | None], list[Tensor | None]] = ([None] * len(w1), [None] * len(w2))
    if not ctx.active:
        return gradients
    active = len(ctx.active)

    def compute(into: list[Tensor], accumulate: bool) -> None:
        _weight_gradient(*tensors, ctx.counts, ctx.active, into[:active], into[active:], accumulate)

    computed = iter(gradients_of([group[expert] for group in (w1, w2) for expert in ctx.active], compute))
    for targets in gradients:
        for expert in ctx.active:
            targets[expert] = next(computed)
    return gradients


_forward.register_autograd(_backward, setup_context=_save)


def grouped_mlp(
    x: Tensor, p: Tensor, counts: Sequence[int], w1: Sequence[Tensor], w2: Sequence[Tensor], kind: Activation
) -> Tensor:
    """Return the experts' outputs for tokens that are sorted by expert, ``[T, H]`` in the dtype of ``x``.

    Weights that require no gradient belong to frozen experts. If all other weights set ``fuse_weight_gradient``, the
    backward pass adds their gradients to their FP32 ``main_grad``. :mod:`moevement_kernels` explains the letters in
    shapes.

    Args:
        x: tokens ``[T, H]``, BF16, FP16 or FP32.
        p: ``[T]``, the probabilities with which the router sent the tokens to their experts.
        counts: tokens of each expert.
        w1: ``[G, H]`` of each expert.
        w2: ``[H, F]`` of each expert.
        kind: activation.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return _forward(x, p, list(counts), list(w1), list(w2), str(kind))[0]


def saved_bytes(tokens: int, active_tokens: int, hidden: int, inner: int, kind: Activation, element: int) -> int:
    """Return the bytes of activations that one call of the MLP keeps for its backward pass; probabilities do not count.

    Args:
        tokens: number of tokens, T.
        active_tokens: number of tokens of active experts.
        hidden: hidden size, H.
        inner: hidden size of an expert, F.
        kind: activation.
        element: bytes of an element of the activations.
    """
    return element * (tokens * inner * (2 if kind.is_gated else 1) + active_tokens * hidden)
