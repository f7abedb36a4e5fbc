"""Backward pass of a frozen expert with FP8 products, simple and slow; it specifies what the kernels compute.

    da = dy W2                      dy and W2 in FP8; the result is never rounded
    dp = sum over F of da * act(h)
    dh = da * p * act'(h)           rounded to the dtype of h, then to FP8
    dx = dh W1                      dh and W1 in FP8

The recipes are those of Transformer Engine for Hopper. With delayed scaling, the matrix of an expert has one scale,
computed from earlier matrices. With current scaling, the one scale is computed from the matrix itself. With blockwise
scaling, every 128 elements of a row, and every 128 x 128 elements of a weight, share a power of two as scale.
Sums are in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moevement_kernels.activations import Activation
from moevement_kernels.reference import through_activation
from moevement_kernels.weights import BLOCK, Weights

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Codes:
    """Rows of tokens in FP8.

    Args:
        data: ``[T, N]`` in an FP8 dtype.
        inverse_scales: FP32 factors of the codes: one for each expert, ``[E]``, or for every 128 elements of a row,
            ``[T, N / 128]`` rounded up.
    """

    data: torch.Tensor
    inverse_scales: torch.Tensor

    @property
    def is_by_block(self) -> bool:
        """True if every 128 elements of a row have a scale; False if there is one scale for each expert."""
        return self.inverse_scales.dim() == 2

    def dense(self, counts: Sequence[int]) -> torch.Tensor:
        """Return the values as FP32, ``[T, N]``."""
        if self.is_by_block:
            return self.data.float() * self.inverse_scales.repeat_interleave(BLOCK, 1)[:, : self.data.shape[1]]
        of_rows = self.inverse_scales.repeat_interleave(torch.tensor(list(counts), device=self.data.device))
        return self.data.float() * of_rows[:, None]


@dataclass(frozen=True)
class Quantiser:
    """Quantiser that converts ``dh`` to FP8.

    Args:
        dtype: E5M2 or E4M3.
        scales: FP32 factors ``[E]`` (delayed scaling); None to derive them from the matrix of each expert.
        is_by_block: True to compute a scale for every 128 elements of a row; ``scales`` must then be None.
    """

    dtype: torch.dtype
    scales: torch.Tensor | None = None
    is_by_block: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (E4M3, E5M2):
            raise ValueError(f"the dtype of dh is {self.dtype}; it must be {E4M3} or {E5M2}")
        if self.is_by_block and self.scales is not None:
            raise ValueError("scales are given, but is_by_block computes a scale for each block; give only one of them")

    def of(self, dh: torch.Tensor, counts: Sequence[int]) -> Codes:
        """Return the codes of ``dh``, ``[T, G]``."""
        if self.is_by_block:
            return by_rows(dh, self.dtype)
        scales = scale_of(amaxes(dh, counts), self.dtype) if self.scales is None else self.scales
        of_rows = scales.repeat_interleave(torch.tensor(list(counts), device=dh.device))
        return Codes(cast(dh.float() * of_rows[:, None], self.dtype), scales.reciprocal())


class FP8InputGradient(NamedTuple):
    """Gradients of a frozen expert's inputs."""

    dx: torch.Tensor
    """Gradient of the tokens, ``[T, H]``, in the dtype of h."""
    dp: torch.Tensor
    """Gradient of the probabilities, FP32 ``[T]``."""
    dh: Codes
    """Gradient of h in FP8, ``[T, G]``."""
    amax: torch.Tensor
    """Largest magnitude of dh, FP32 ``[E]``; 0 for an expert without tokens. Later scales are computed from it."""


def input_gradient(
    dy: Codes, h: torch.Tensor, p: torch.Tensor, counts: Sequence[int], w1: Weights, w2: Weights, kind: Activation,
    quantiser: Quantiser,
) -> FP8InputGradient:  # fmt: skip
    """Return the gradients for tokens sorted by expert.

    Args:
        dy: gradient of the outputs, ``[T, H]``.
        h: BF16 or FP16 ``[T, G]`` from the forward pass.
        p: probabilities ``[T]``.
        counts: tokens of each expert.
        w1: FP8 ``[H, G]`` of each expert. Hopper's FP8 products need the right operand **transposed**.
        w2: FP8 ``[F, H]`` of each expert, transposed as ``w1`` is.
        kind: activation.
        quantiser: quantiser of dh.
    """
    splits, parts = list(counts), []
    rows = zip(dy.dense(counts).split(splits), h.split(splits), p.split(splits), strict=True)
    for expert, (dy_, h_, p_) in enumerate(rows):
        parts.append(through_activation(dy_ @ w2.dense(expert).T, h_, p_, kind))
    dp, dh = (torch.cat(gradients) for gradients in zip(*parts, strict=True))
    codes = quantiser.of(dh, counts)
    dx = [dh_ @ w1.dense(expert).T for expert, dh_ in enumerate(codes.dense(counts).split(splits))]
    return FP8InputGradient(torch.cat(dx).to(h.dtype), dp, codes, amaxes(dh, counts))


def amaxes(matrix: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the largest magnitude of each expert's rows, FP32 ``[E]``; infinite if an element is NaN."""
    parts = matrix.nan_to_num(float("inf"), float("inf"), -float("inf")).split(list(counts))
    return torch.stack([part.abs().max().float() if part.numel() else part.new_zeros((), dtype=torch.float32)
                        for part in parts])  # fmt: skip


def by_rows(matrix: torch.Tensor, dtype: torch.dtype) -> Codes:
    """Quantise with power-of-two scales, one for every 128 elements of a row."""
    columns = matrix.shape[1]
    across = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(matrix.abs().float(), (0, across * BLOCK - columns))
    scale = scale_of(padded.view(-1, across, BLOCK).amax(2), dtype, power_of_two=True)
    codes = cast(matrix.float() * scale.repeat_interleave(BLOCK, 1)[:, :columns], dtype)
    return Codes(codes, scale.reciprocal())


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the nearest code, ties to even, and saturate at the largest number."""
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest).to(dtype)


def scale_of(amax: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> torch.Tensor:
    """Return the scale that brings ``amax`` to the largest number of ``dtype``; 1 if ``amax`` is 0 or not finite."""
    scale = (torch.full_like(amax, torch.finfo(dtype).max) / amax).clamp_max(torch.finfo(torch.float32).max)
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32) if power_of_two else scale
