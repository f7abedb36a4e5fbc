"""Launcher of the grouped expert MLP: it checks shapes, allocates memory, and runs the kernel or the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moevement_kernels import reference
from moevement_kernels.activations import Activation
from moevement_kernels.backend import Backend, has_kernels, selected
from moevement_kernels.cuda import grouped_product
from moevement_kernels.reference import Forward, InputGradient
from moevement_kernels.tiles import RowTiles, Tiles, addresses, counts_of_active, offsets, row_tiles, tiles_of
from moevement_kernels.weights import Weights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP = 8
"""Number of row tiles that programs process in turn for the same columns, so that weights stay in the cache."""


def forward(
    x: torch.Tensor,
    p: torch.Tensor,
    counts: Sequence[int],
    w1: Weights,
    w2: Weights,
    kind: Activation,
    tiles: Tiles | None = None,
) -> Forward:
    """Compute :func:`reference.forward` with the selected backend. Tests and benchmarks set ``tiles``."""
    _check(x, p, counts, w1, w2, kind)
    if not has_kernels(x):
        return reference.forward(x, p, counts, w1, w2, kind)
    from moevement_kernels import triton_kernels as kernels

    size = tiles or tiles_of(x.dtype, two_products=kind.is_gated)
    rows = row_tiles(counts, size.rows, x.device)
    h, a = x.new_empty(x.shape[0], w1.rows), x.new_empty(x.shape[0], w2.columns)
    y = torch.empty_like(x)
    w1_at, w2_at = addresses("weight", w1.data, x.device), addresses("weight", w2.data, x.device)
    kernels.up_kernel[(rows.count * _cdiv(w2.columns, size.columns),)](
        x, p, w1_at, h, a, rows.expert, rows.begin, rows.end, rows.count, x.shape[1], w2.columns,
        **activation_constants(kind), DTYPE=_named(x.dtype), **_sizes(size),
    )  # fmt: skip
    _product(a, w2, w2_at, y, rows, tiles or tiles_of(x.dtype), is_transposed=True)
    return Forward(y, h)


def input_gradient(
    dy: torch.Tensor,
    h: torch.Tensor,
    p: torch.Tensor,
    counts: Sequence[int],
    w1: Weights,
    w2: Weights,
    kind: Activation,
    active: Sequence[bool] | None = None,
    tiles: Tiles | None = None,
) -> InputGradient:
    """Compute :func:`reference.input_gradient` with the selected backend. Tests and benchmarks set ``tiles``."""
    _check(dy, p, counts, w1, w2, kind, rows="gradients of outputs")
    if not has_kernels(h):
        return reference.input_gradient(dy, h, p, counts, w1, w2, kind, active)
    from moevement_kernels import triton_kernels as kernels

    size = tiles or tiles_of(h.dtype)
    active_counts = counts_of_active(counts, active)
    rows = row_tiles(counts, size.rows, h.device)
    tokens, hidden, inner = h.shape[0], w2.rows, w2.columns
    across = _cdiv(inner, size.columns)
    dh, dx, a = torch.empty_like(h), h.new_empty(tokens, hidden), h.new_empty(sum(active_counts), inner)
    parts = torch.empty(across, tokens, dtype=torch.float32, device=h.device)
    kernels.hidden_gradient_kernel[(rows.count * across,)](
        dy.contiguous(), h, p, addresses("weight", w2.data, h.device), dh, a, parts, rows.expert, rows.begin, rows.end,
        offsets(counts, h.device), offsets(active_counts, h.device), rows.count, tokens, hidden, inner,
        **activation_constants(kind), DTYPE=_named(h.dtype), **_sizes(size),
    )  # fmt: skip
    _product(dh, w1, addresses("weight", w1.data, h.device), dx, rows, size, is_transposed=False)
    return InputGradient(dx, parts.sum(0), dh, a)


def weight_gradient(
    dy: torch.Tensor,
    dh: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    counts: Sequence[int],
    into: tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]],
    accumulate: bool,
    tiles: Tiles | None = None,
) -> None:
    """Write the gradients of the weights W1 and W2 into FP32 tensors, or add them to the tensors.

    :mod:`moevement_kernels` explains the letters in shapes.

    Args:
        dy: gradient of the outputs, ``[T, H]``.
        dh: gradient of h (the values before the activation), ``[T, G]``.
        x: tokens of active experts, ``[tokens of active experts, H]``.
        a: activations times probabilities, ``[tokens of active experts, F]``, from :func:`input_gradient`.
        counts: tokens of each expert.
        into: two lists with a tensor for each expert: ``[G, H]`` for W1, ``[H, F]`` for W2. None for a frozen expert.
        accumulate: True to add to the tensors, False to overwrite them.
        tiles: sizes of the work of a Triton program, which tests set; None for the usual sizes.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    active = [target is not None for target in into[0]]
    if active != [target is not None for target in into[1]]:
        raise ValueError(
            f"W1 has gradient tensors for the experts with active flags {active}, but W2 has gradient tensors for "
            "other experts; give both tensors of an expert, or none"
        )
    for names, left, right, targets in ((("W1", "x"), dh, x, into[0]), (("W2", "a"), dy, a, into[1])):
        linear_weight_gradient(left, right, counts, targets, accumulate=accumulate, tiles=tiles, names=names)


def linear_weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    counts: Sequence[int],
    into: Sequence[torch.Tensor | None],
    *,
    accumulate: bool,
    tiles: Tiles | None = None,
    names: tuple[str, str] = ("the weight", "x"),
) -> None:
    """Write the gradient ``dy^T x`` of one linear layer into FP32 tensors, or add it to the tensors.

    Args:
        dy: gradient of the outputs, ``[T, rows]``.
        x: inputs of active experts, ``[tokens of active experts, columns]``.
        counts: tokens of each expert.
        into: tensor ``[rows, columns]`` for each expert; None for a frozen expert.
        accumulate: True to add to the tensors, False to overwrite them.
        tiles: sizes of the work of a Triton program, which tests set; None for the usual sizes.
        names: names of the weight and of ``x`` in messages of errors.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    active = [target is not None for target in into]
    _check_targets(dy, x, counts, into, names=names)
    if not any(active):
        return
    if not has_kernels(x):
        for target, gradient in zip(into, reference.linear_weight_gradient(dy, x, counts, active), strict=True):
            if target is not None and gradient is not None:
                target.copy_(target + gradient if accumulate else gradient)
        return
    from moevement_kernels import triton_kernels as kernels

    size = tiles or tiles_of(x.dtype)
    all_offsets, own = offsets(counts, x.device), offsets(counts_of_active(counts, active), x.device)
    rows, columns = dy.shape[1], x.shape[1]
    kernels.weight_gradient_kernel[_cdiv(rows, size.rows) * _cdiv(columns, size.columns), len(counts)](
        dy.contiguous(), x.contiguous(), addresses("gradient", into, x.device), all_offsets, own, rows, columns,
        ACCUMULATE=accumulate, BM=size.rows, BN=size.columns, BK=size.inner, **run_options(size),
    )  # fmt: skip


def _check_targets(
    dy: torch.Tensor, x: torch.Tensor, counts: Sequence[int], into: Sequence[torch.Tensor | None], *,
    names: tuple[str, str],
) -> None:  # fmt: skip
    active = [target is not None for target in into]
    if x.dtype not in DTYPES or dy.dtype != x.dtype or dy.shape[0] != sum(counts) or len(into) != len(counts):
        raise ValueError(
            f"the gradient of the outputs is {tuple(dy.shape)} {dy.dtype}, {names[1]} is {x.dtype}, and there are "
            f"{len(into)} gradients for token counts {list(counts)}; the gradient of the outputs needs a row for each "
            f"token and the dtype of {names[1]}, which must be one of {DTYPES}; each token count needs one gradient"
        )
    if x.shape[0] != sum(counts_of_active(counts, active)):
        raise ValueError(
            f"{names[1]} has {x.shape[0]} rows; it must have the rows of active experts only, for active flags "
            f"{active} and token counts {list(counts)}"
        )
    shape = (dy.shape[1], x.shape[1])
    for expert, target in enumerate(into):
        if target is not None and (
            target.dtype != torch.float32 or target.shape != shape or not target.is_contiguous()
        ):
            raise ValueError(
                f"the gradient of {names[0]} for expert {expert} is {tuple(target.shape)} {target.dtype}; it must be "
                f"{shape} float32 and contiguous"
            )


def _product(
    left: torch.Tensor,
    weights: Weights,
    at: torch.Tensor,
    out: torch.Tensor,
    rows: RowTiles,
    size: Tiles,
    is_transposed: bool,
) -> None:
    if not is_transposed and selected() is Backend.CUDA and grouped_product.fits(left, weights, rows, size):
        grouped_product.run(left, weights, rows, out)
        return
    from moevement_kernels import triton_kernels as kernels

    inner, columns = left.shape[1], out.shape[1]
    kernels.product_kernel[(rows.count * _cdiv(columns, size.columns),)](
        left, at, out, rows.expert, rows.begin, rows.end, rows.count, inner, columns, weights.columns,
        TRANSPOSED=is_transposed, DTYPE=_named(left.dtype), **_sizes(size),
    )  # fmt: skip


def _check(
    x: torch.Tensor,
    p: torch.Tensor,
    counts: Sequence[int],
    w1: Weights,
    w2: Weights,
    kind: Activation,
    *,
    rows: str = "tokens",
) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"{rows} are {x.dtype}; the dtype must be one of {DTYPES}")
    if x.dim() != 2 or x.shape[1] != w2.rows or p.shape != x.shape[:1] or sum(counts) != x.shape[0]:
        raise ValueError(
            f"{rows} {tuple(x.shape)} and probabilities {tuple(p.shape)}; the token counts sum to T = {sum(counts)}, "
            f"so the shapes must be [T, {w2.rows}] and [T]"
        )
    for name, weights in (("W1", w1), ("W2", w2)):
        first = weights.data[0]
        if first.dtype != x.dtype or first.device != x.device:
            raise ValueError(
                f"{name} is {first.dtype} on {first.device}, and {rows} are {x.dtype} on {x.device}; give both on "
                "one device, with one dtype"
            )
    wanted = w2.columns * (2 if kind.is_gated else 1)
    if (w1.rows, w1.columns) != (wanted, w2.rows) or len(w1.data) != len(counts) or len(w2.data) != len(counts):
        raise ValueError(
            f"W1 of {len(w1.data)} experts is {(w1.rows, w1.columns)}, and W2 of {len(w2.data)} experts is "
            f"{(w2.rows, w2.columns)}; with this W2 and the activation {kind}, W1 must be {(wanted, w2.rows)}, and "
            f"both must have {len(counts)} experts"
        )


def activation_constants(kind: Activation) -> dict[str, Any]:
    """Return the compile-time constants by which a kernel selects its activation."""
    return {"KIND": list(Activation).index(kind), "GATED": kind.is_gated}


def _named(dtype: torch.dtype) -> Any:
    from triton import language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def _sizes(size: Tiles) -> dict[str, int]:
    return {"BM": size.rows, "BN": size.columns, "BK": size.inner, "GROUP": GROUP, **run_options(size)}


def run_options(size: Tiles) -> dict[str, int]:
    """Return Triton's options for a launch: warps of a program, and stages of its software pipeline."""
    return {"num_warps": size.warps, "num_stages": size.stages}


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
