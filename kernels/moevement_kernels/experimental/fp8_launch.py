"""Launcher for FP8 backward passes of frozen experts: it checks shapes, and runs the kernel or the reference.

``--moevement-frozen-kernels`` does not select these kernels, because no GPU has shown yet that they are right and
faster (``python -m benchmarks.kernels``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moevement_kernels.activations import Activation
from moevement_kernels.backend import has_kernels
from moevement_kernels.experimental import fp8_reference as reference
from moevement_kernels.experimental.fp8_reference import E5M2, Codes, FP8InputGradient, Quantiser
from moevement_kernels.launch import GROUP, activation_constants, run_options
from moevement_kernels.tiles import RowTiles, Tiles, addresses, row_tiles
from moevement_kernels.weights import BLOCK, Format, Weights

TILES = Tiles(inner=128)
"""Tiles for scales by block and by tensor; three stages take 96 KiB of shared memory."""


def input_gradient(
    dy: Codes, h: torch.Tensor, p: torch.Tensor, counts: Sequence[int], w1: Weights, w2: Weights, kind: Activation,
    quantiser: Quantiser, tiles: Tiles | None = None,
) -> FP8InputGradient:  # fmt: skip
    """Compute :func:`moevement_kernels.experimental.fp8_reference.input_gradient`.

    Raises:
        ValueError: shapes, dtypes or scales do not fit.
    """
    _check(dy, h, p, counts, w1, w2, kind, quantiser)
    if not has_kernels(h):
        return reference.input_gradient(dy, h, p, counts, w1, w2, kind, quantiser)
    from moevement_kernels.experimental import triton_fp8 as kernels

    h = h.contiguous()
    size = tiles or TILES
    if quantiser.is_by_block and (size.columns != BLOCK or BLOCK % size.inner):
        raise ValueError(
            f"tiles have {size.columns} columns and {size.inner} inner elements; scales by block need {BLOCK} columns, "
            "and inner elements that divide this number"
        )
    tokens, hidden, inner = h.shape[0], w2.columns, w2.rows
    rows = row_tiles(counts, size.rows, h.device)
    across = _cdiv(inner, size.columns)
    is_current = not quantiser.is_by_block and quantiser.scales is None
    codes = torch.empty_like(h) if is_current else torch.empty(h.shape, dtype=torch.uint8, device=h.device)
    scales = _scales_of(quantiser, h)
    amaxes = torch.zeros(across, rows.count, dtype=torch.float32, device=h.device)
    parts = torch.empty(across, tokens, dtype=torch.float32, device=h.device)
    mode = kernels.CURRENT if is_current else kernels.BY_BLOCK if quantiser.is_by_block else kernels.DELAYED
    kernels.hidden_gradient_kernel[(rows.count * across,)](
        dy.data.contiguous().view(torch.uint8), dy.inverse_scales.contiguous(), h, p.contiguous(), *_weights_at(w2),
        codes, scales, amaxes, parts, rows.expert, rows.begin, rows.end, rows.count, tokens, hidden, inner,
        w2.scale_stride, **activation_constants(kind), MODE=mode.value, DY_DTYPE=_named(dy.data.dtype),
        DH_DTYPE=_named(quantiser.dtype), LARGEST=torch.finfo(quantiser.dtype).max, DTYPE=_named(h.dtype),
        **_sizes(size),
    )  # fmt: skip
    amax = torch.zeros(len(counts), dtype=torch.float32, device=h.device)
    amax.scatter_reduce_(0, rows.expert.long(), amaxes.amax(0), "amax")
    dh = _codes(codes, scales, quantiser, counts, is_current=is_current)
    dx = torch.empty(tokens, hidden, dtype=h.dtype, device=h.device)
    _product(dh, w1, dx, rows, size)
    return FP8InputGradient(dx, parts.sum(0), dh, amax)


def _scales_of(quantiser: Quantiser, h: torch.Tensor) -> torch.Tensor:
    if quantiser.is_by_block:
        return torch.empty(h.shape[0], _cdiv(h.shape[1], BLOCK), dtype=torch.float32, device=h.device)
    return quantiser.scales.contiguous() if quantiser.scales is not None else torch.empty(0, device=h.device)


def _codes(
    written: torch.Tensor, scales: torch.Tensor, quantiser: Quantiser, counts: Sequence[int], *, is_current: bool
) -> Codes:
    if is_current:
        return quantiser.of(written, counts)
    return Codes(written.view(quantiser.dtype), scales if quantiser.is_by_block else scales.reciprocal())


def _product(left: Codes, weights: Weights, out: torch.Tensor, rows: RowTiles, size: Tiles) -> None:
    from moevement_kernels.experimental import triton_fp8 as kernels

    kernels.product_kernel[(rows.count * _cdiv(weights.rows, size.columns),)](
        left.data.view(torch.uint8), left.inverse_scales, *_weights_at(weights), out, rows.expert, rows.begin, rows.end,
        rows.count, weights.columns, weights.rows, weights.scale_stride, IS_BY_BLOCK=left.is_by_block,
        L_DTYPE=_named(left.data.dtype), DTYPE=_named(out.dtype), **_sizes(size),
    )  # fmt: skip


def _check(
    dy: Codes, h: torch.Tensor, p: torch.Tensor, counts: Sequence[int], w1: Weights, w2: Weights, kind: Activation,
    quantiser: Quantiser,
) -> None:  # fmt: skip
    if h.is_cuda and torch.cuda.get_device_capability(h.device)[0] != 9:
        raise ValueError(
            f"the GPU has compute capability {torch.cuda.get_device_capability(h.device)}; FP8 products need 9.0"
        )
    inner, hidden = w2.rows, w2.columns
    wanted = inner * (2 if kind.is_gated else 1)
    if (w1.rows, w1.columns) != (hidden, wanted) or not len(w1.data) == len(w2.data) == len(counts):
        raise ValueError(
            f"W1 of {len(w1.data)} experts is {(w1.rows, w1.columns)}, and W2 of {len(w2.data)} experts is "
            f"{(w2.rows, w2.columns)}; FP8 products need transposed weights, {(hidden, wanted)} and [F, H], for "
            f"{len(counts)} experts and the activation {kind}"
        )
    tokens = sum(counts)
    shapes = (tuple(dy.data.shape), tuple(h.shape), tuple(p.shape))
    if shapes != ((tokens, hidden), (tokens, wanted), (tokens,)):
        raise ValueError(
            f"shapes of dy, h and p are {shapes}; needed are {((tokens, hidden), (tokens, wanted), (tokens,))}"
        )
    if h.dtype not in (torch.bfloat16, torch.float16) or dy.data.dtype not in (reference.E4M3, E5M2):
        raise ValueError(f"h is {h.dtype} and dy is {dy.data.dtype}; h must be BF16 or FP16, and dy must be FP8")
    by_block = quantiser.is_by_block
    if not _has_scales(w1, by_block) or not _has_scales(w2, by_block) or dy.is_by_block != by_block:
        raise ValueError(
            f"W1 is scaled as {w1.format.name}, W2 as {w2.format.name}, dy by scales of shape "
            f"{tuple(dy.inverse_scales.shape)}, and dh by {'block' if by_block else 'expert'}; scale all "
            "four by block, or all four by expert"
        )
    scales = (tokens, _cdiv(hidden, BLOCK)) if by_block else (len(counts),)
    if dy.inverse_scales.shape != scales or (quantiser.scales is not None and quantiser.scales.shape != scales):
        raise ValueError(
            f"the scales of dy have shape {tuple(dy.inverse_scales.shape)}; scales of dy and dh need shape {scales}"
        )
    if hidden % 16 or inner % 16 or (by_block and inner % BLOCK and kind.is_gated):
        needed = f"H as a multiple of 16, and F as a multiple of {BLOCK if by_block and kind.is_gated else 16}"
        raise ValueError(f"H is {hidden} and F is {inner}; FP8 products need {needed}")


def _has_scales(weights: Weights, by_block: bool) -> bool:
    if weights.format is Format.FP8_PER_TENSOR:  # A weight of a single block has this format as well.
        return not by_block or max(weights.rows, weights.columns) <= BLOCK
    return by_block and weights.format is Format.FP8_PER_BLOCK


def _weights_at(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    assert weights.inverse_scales is not None
    device = weights.data[0].device
    scales = addresses("inverse scale", weights.inverse_scales, device, multiple=4)
    return addresses("weight", weights.data, device), scales


def _sizes(size: Tiles) -> dict[str, Any]:
    return {"BM": size.rows, "BN": size.columns, "BK": size.inner, "GROUP": GROUP, **run_options(size)}


def _named(dtype: torch.dtype) -> Any:
    from triton import language as tl

    return {
        torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, reference.E4M3: tl.float8e4nv, E5M2: tl.float8e5,
    }[dtype]  # fmt: skip


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
