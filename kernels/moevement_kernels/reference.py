"""Grouped expert MLP, simple and slow; it specifies what the kernels compute.

    h = x W1^T                      kept in the tokens' dtype
    a = act(h) p                    p: the probability with which the router sent the token to the expert
    y = a W2^T

The backward pass, given dy:

    da = dy W2                      never rounded
    dp = sum of da * act(h)         over the hidden size of an expert
    dh = da * p * act'(h)           kept in the tokens' dtype
    dx = dh W1
    dW2 = dy^T a,  dW1 = dh^T x     only for active experts

Sums are in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moevement_kernels.activations import Activation, activate, derivative
from moevement_kernels.weights import Weights


class Forward(NamedTuple):
    """Results of the forward pass."""

    y: torch.Tensor
    """Outputs, ``[T, H]``."""
    h: torch.Tensor
    """Values before the activation, which the backward pass needs: a row of G values for each of T tokens."""


class InputGradient(NamedTuple):
    """Results of the backward pass for all experts, frozen or active: all but the weight gradients."""

    dx: torch.Tensor
    """Gradient of the tokens, ``[T, H]``."""
    dp: torch.Tensor
    """Gradient of the probabilities, FP32 ``[T]``."""
    dh: torch.Tensor
    """Gradient of h (the values before the activation), from which the gradient of the first weight follows."""
    a: torch.Tensor
    """Activations times probabilities, from which the gradient of the second weight follows: a row for each token of an
    active expert."""


def forward(
    x: torch.Tensor, p: torch.Tensor, counts: Sequence[int], w1: Weights, w2: Weights, kind: Activation
) -> Forward:
    """Return the results of the forward pass for tokens that are sorted by expert.

    :mod:`moevement_kernels` explains the letters in shapes.

    Args:
        x: tokens ``[T, H]``.
        p: probabilities ``[T]``.
        counts: number of tokens of each expert.
        w1: first weight of each expert, ``[G, H]``.
        w2: second weight of each expert, ``[H, F]``.
        kind: activation.
    """
    ys, hs = [], []
    for expert, (x_, p_) in enumerate(zip(x.split(list(counts)), p.split(list(counts)), strict=True)):
        h = (x_.float() @ w1.dense(expert).T).to(x.dtype)
        a = _scaled(h, p_, kind)
        ys.append((a.float() @ w2.dense(expert).T).to(x.dtype))
        hs.append(h)
    return Forward(torch.cat(ys), torch.cat(hs))


def input_gradient(
    dy: torch.Tensor,
    h: torch.Tensor,
    p: torch.Tensor,
    counts: Sequence[int],
    w1: Weights,
    w2: Weights,
    kind: Activation,
    active: Sequence[bool] | None = None,
) -> InputGradient:
    """Return the gradients that the backward pass computes for all experts, frozen or active.

    :mod:`moevement_kernels` explains the letters in shapes.

    Args:
        dy: gradient of the outputs, ``[T, H]``.
        h: values before the activation, ``[T, G]``, from the forward pass.
        p: probabilities ``[T]``.
        counts: number of tokens of each expert.
        w1: first weight of each expert, ``[G, H]``.
        w2: second weight of each expert, ``[H, F]``.
        kind: activation.
        active: True for each active expert; None if all are frozen.
    """
    splits = list(counts)
    parts = []
    for expert, (dy_, h_, p_) in enumerate(zip(dy.split(splits), h.split(splits), p.split(splits), strict=True)):
        dp, dh = through_activation(dy_.float() @ w2.dense(expert), h_, p_, kind)
        is_active = active is not None and active[expert]
        kept = _scaled(h_, p_, kind) if is_active else h_.new_empty(0, w2.columns)
        parts.append(InputGradient((dh.float() @ w1.dense(expert)).to(h.dtype), dp, dh, kept))
    return InputGradient(*(torch.cat(values) for values in zip(*parts, strict=True)))


def through_activation(
    da: torch.Tensor, h: torch.Tensor, p: torch.Tensor, kind: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``dp`` in FP32, and ``dh`` in the dtype of ``h``, from ``da`` in FP32 (formulas: top of the file)."""
    gate, linear = _halves(h.float(), kind)
    activated, slope = activate(kind, gate), derivative(kind, gate)
    scaled = da * p.float()[:, None]
    if linear is None:
        dp, dh = (da * activated).sum(-1), scaled * slope
    else:
        dp = (da * activated * linear).sum(-1)
        dh = torch.cat([scaled * linear * slope, scaled * activated], -1)
    return dp, dh.to(h.dtype)


def weight_gradient(
    dy: torch.Tensor,
    dh: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    counts: Sequence[int],
    active: Sequence[bool],
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Return the FP32 gradients of the weights W1 and W2, by expert; None for each frozen expert.

    :mod:`moevement_kernels` explains the letters in shapes.

    Args:
        dy: gradient of the outputs, ``[T, H]``.
        dh: gradient of h, ``[T, G]``.
        x: tokens of active experts, ``[tokens of active experts, H]``.
        a: activations times probabilities, ``[tokens of active experts, F]``.
        counts: tokens of each expert.
        active: True for each active expert.
    """
    return linear_weight_gradient(dh, x, counts, active), linear_weight_gradient(dy, a, counts, active)


def linear_weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, counts: Sequence[int], active: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the FP32 gradient ``dy^T x`` of one linear layer, by expert; None for each frozen expert.

    Args:
        dy: gradient of the outputs, ``[T, rows]``.
        x: inputs of active experts, ``[tokens of active experts, columns]``.
        counts: tokens of each expert.
        active: True for each active expert.
    """
    kept = iter(x.split([count for count, is_active in zip(counts, active, strict=True) if is_active]))
    return [
        dy_.float().T @ next(kept).float() if is_active else None
        for dy_, is_active in zip(dy.split(list(counts)), active, strict=True)
    ]


def _halves(h: torch.Tensor, kind: Activation) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not kind.is_gated:
        return h, None
    gate, linear = h.chunk(2, -1)
    return gate, linear


def _scaled(h: torch.Tensor, p: torch.Tensor, kind: Activation) -> torch.Tensor:
    gate, linear = _halves(h.float(), kind)
    a = activate(kind, gate) if linear is None else activate(kind, gate) * linear
    return (a * p.float()[:, None]).to(h.dtype)
