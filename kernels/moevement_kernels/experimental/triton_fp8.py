"""Backward pass of a frozen expert with FP8 products, in Triton (compute capability 9.0).

``fp8_reference.py`` specifies the results. Hopper's tensor cores sum FP8 products with fewer bits than FP32 has. So
each step of the inner dimension is a separate product, and the kernel adds it to a sum in FP32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moevement_kernels.triton_kernels import UNALIGNED, _activate, _at, _derivative, _place, _scale_at, _tile
from moevement_kernels.triton_rounding import INTERPRETED, narrow

BLOCK = tl.constexpr(128)
DELAYED = tl.constexpr(0)
CURRENT = tl.constexpr(1)
BY_BLOCK = tl.constexpr(2)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _magnitude(x):
    """Return the magnitude; infinite for NaN, which a maximum would drop."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _dot(left, right):
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, out_dtype=tl.float32)


@triton.jit
def _cast(x, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """Round to the nearest FP8 number, ties to even, and saturate at the largest.

    Under the interpreter, the value is rounded before it is converted.
    """
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        KEPT: tl.constexpr = 21 if tl.float8e5 == DTYPE else 20  # bits of FP32 that are removed
        SMALLEST: tl.constexpr = 2.0**-14 if tl.float8e5 == DTYPE else 2.0**-6  # smallest normal number
        STEP: tl.constexpr = 2.0**-16 if tl.float8e5 == DTYPE else 2.0**-9
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + (1 << (KEPT - 1)) - 1 + ((bits >> KEPT) & 1)) >> KEPT << KEPT
        magic = 1.5 * 2.0**23 * STEP
        rounded = tl.where(tl.abs(x) < SMALLEST, (x + magic) - magic, bits.to(tl.float32, bitcast=True))
        x = tl.where(x == x, rounded, x)
    return x.to(DTYPE)


@triton.jit
def _product(
    left, left_scales, w, scales, rows, here, columns, expert, K, N, scale_stride,
    IS_BY_BLOCK: tl.constexpr, L_DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return ``left W^T`` of rows ``[T, K]`` and weights ``[N, K]``, FP32 ``[BM, BN]``."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    across = tl.cdiv(K, BLOCK)
    for k in range(0, K, BK):
        inner = k + tl.arange(0, BK)
        l_tile = tl.load(left + rows[:, None] * K + inner[None, :], mask=here[:, None] & (inner < K)[None, :], other=0)
        w_tile = tl.load(
            w + columns[None, :].to(tl.int64) * K + inner[:, None],
            mask=(columns < N)[None, :] & (inner < K)[:, None], other=0,
        )  # fmt: skip
        part = _dot(l_tile.to(L_DTYPE, bitcast=True), w_tile.to(tl.float8e4nv, bitcast=True))
        if IS_BY_BLOCK:  # Tile sizes divide the block size.
            of_rows = tl.load(left_scales + rows * across + k // BLOCK, mask=here, other=0)
            of_weight = tl.load(scales + (tl.min(columns, 0) // BLOCK) * scale_stride + k // BLOCK)
            part *= of_rows[:, None] * of_weight
        total += part
    if not IS_BY_BLOCK:
        total *= tl.load(left_scales + expert) * tl.load(scales)
    return total


@triton.jit
def _store_codes(
    value, codes, scales, rows, inside, here, place, block, blocks, scale,
    MODE: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store a tile of dh in FP8. With current scaling, store it unchanged: the scale needs the whole matrix's amax."""
    if MODE == CURRENT:
        tl.store(codes + place, value, mask=inside)
    else:
        wide = value.to(tl.float32)
        if MODE == BY_BLOCK:
            amax = tl.max(tl.where(inside, _magnitude(wide), 0.0), 1)
            known = (amax > 0) & (amax < float("inf"))  # Rows with a NaN or an infinite element are not scaled.
            block_scale = tl.minimum(tl.div_rn(LARGEST + tl.zeros_like(amax), tl.where(known, amax, 1.0)), FLOAT_MAX)
            block_scale = (block_scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            block_scale = tl.where(known, block_scale, 1.0)
            tl.store(
                scales + rows * blocks + block, tl.div_rn(tl.zeros_like(block_scale) + 1.0, block_scale), mask=here
            )
            wide *= block_scale[:, None]
        else:
            wide *= scale
        tl.store(codes + place, _cast(wide, LARGEST, DTYPE).to(tl.uint8, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=("tiles", "tokens"), do_not_specialize_on_alignment=UNALIGNED)
def hidden_gradient_kernel(
    dy, dy_scales, h, p, w2_at, scale_at, dh, dh_scales, amaxes, dp_parts, tile_expert, tile_begin, tile_end, tiles,
    tokens, H, F, scale_stride, KIND: tl.constexpr, GATED: tl.constexpr, MODE: tl.constexpr, DY_DTYPE: tl.constexpr,
    DH_DTYPE: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute ``da = dy W2`` in registers, and from it ``dh``, the amax of ``dh``, and this tile's part of ``dp``.

    ``w2`` is ``[F, H]``; ``amaxes`` and ``dp_parts`` are ``[column tiles, row tiles]`` and ``[column tiles, T]``.
    """
    tile, column = _place(tiles, F, BN, GROUP)
    expert, rows, here, columns = _tile(tile, column, tile_expert, tile_begin, tile_end, BM, BN)
    da = _product(
        dy, dy_scales, _at(w2_at, expert, tl.uint8), _scale_at(scale_at, expert), rows, here, columns, expert, H, F,
        scale_stride, MODE == BY_BLOCK, DY_DTYPE, BM, BN, BK,
    )  # fmt: skip
    G = 2 * F if GATED else F
    inside = here[:, None] & (columns < F)[None, :]
    place = rows[:, None] * G + columns[None, :]
    gate = tl.load(h + place, mask=inside, other=0).to(tl.float32)
    activated = _activate(gate, KIND)
    scaled = da * tl.load(p + rows, mask=here, other=0).to(tl.float32)[:, None]
    scale = 1.0
    if MODE == DELAYED:
        scale = tl.load(dh_scales + expert)
    block, blocks = column * BN // BLOCK, tl.cdiv(G, BLOCK)
    if GATED:
        linear = tl.load(h + place + F, mask=inside, other=0).to(tl.float32)
        dp = tl.sum(da * activated * linear, 1)
        first = narrow(scaled * linear * _derivative(gate, KIND), DTYPE)
        second = narrow(scaled * activated, DTYPE)
        amax = tl.maximum(_magnitude(first.to(tl.float32)), _magnitude(second.to(tl.float32)))
        _store_codes(second, dh, dh_scales, rows, inside, here, place + F, block + F // BLOCK, blocks, scale, MODE,
                     LARGEST, DH_DTYPE)  # fmt: skip
    else:
        dp = tl.sum(da * activated, 1)
        first = narrow(scaled * _derivative(gate, KIND), DTYPE)
        amax = _magnitude(first.to(tl.float32))
    _store_codes(first, dh, dh_scales, rows, inside, here, place, block, blocks, scale, MODE, LARGEST, DH_DTYPE)
    tl.store(amaxes + column * tiles + tile, tl.max(tl.max(tl.where(inside, amax, 0.0), 1), 0))
    tl.store(dp_parts + column.to(tl.int64) * tokens + rows, dp, mask=here)


@triton.jit(do_not_specialize=("tiles",), do_not_specialize_on_alignment=UNALIGNED)
def product_kernel(
    left, left_scales, w_at, scale_at, out, tile_expert, tile_begin, tile_end, tiles, K, N, scale_stride,
    IS_BY_BLOCK: tl.constexpr, L_DTYPE: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute ``left W^T`` with ``[N, K]`` weights."""
    tile, column = _place(tiles, N, BN, GROUP)
    expert, rows, here, columns = _tile(tile, column, tile_expert, tile_begin, tile_end, BM, BN)
    total = _product(
        left, left_scales, _at(w_at, expert, tl.uint8), _scale_at(scale_at, expert), rows, here, columns, expert, K, N,
        scale_stride, IS_BY_BLOCK, L_DTYPE, BM, BN, BK,
    )  # fmt: skip
    inside = here[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], narrow(total, DTYPE), mask=inside)
