"""Triton kernels of the grouped expert MLP; ``reference.py`` specifies what they compute.

Each weight of an expert is a separate parameter at some address, so kernels read a table of addresses. Row indices have
64 bits. The order of sums over the inner dimension does not depend on the tokens or weights of other experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moevement_kernels.triton_rounding import INTERPRETED, narrow

SWIGLU = tl.constexpr(0)
GEGLU = tl.constexpr(1)
GELU = tl.constexpr(2)
RELU = tl.constexpr(3)
SQUARED_RELU = tl.constexpr(4)

UNALIGNED = ("p", "tile_expert", "tile_begin", "tile_end", "offsets", "active_offsets")
"""Arguments whose alignment Triton ignores. Kernels read single numbers from them, so alignment would not help."""


@triton.jit
def _dot(left, right, total):
    if INTERPRETED:  # The interpreter multiplies the bits of BF16 as if they were integers.
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == SWIGLU:
        return x * tl.sigmoid(x)
    elif KIND == GEGLU or KIND == GELU:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == RELU:
        return tl.maximum(x, 0.0)
    else:
        above = tl.maximum(x, 0.0)
        return above * above


@triton.jit
def _derivative(x, KIND: tl.constexpr):
    if KIND == SWIGLU:
        sigmoid = tl.sigmoid(x)
        return sigmoid * (1 + x * (1 - sigmoid))
    elif KIND == GEGLU or KIND == GELU:
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == RELU:
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return 2 * tl.maximum(x, 0.0)


@triton.jit
def _at(addresses, expert, DTYPE: tl.constexpr):
    """Return the address of an expert's weight or gradient. It is a multiple of 16 bytes, on which loads rely."""
    return tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _place(tiles, columns, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the row tile and the column tile of this program.

    Programs that run at about the same time get neighbouring tiles. So they share weights and rows in the cache.
    """
    program = tl.program_id(0)
    across = tl.cdiv(columns, BN)
    group = program // (GROUP * across)
    first = group * GROUP
    size = min(tiles - first, GROUP)
    inside = program % (GROUP * across)
    return first + inside % size, inside // size


@triton.jit
def _tile(tile, column, tile_expert, tile_begin, tile_end, BM: tl.constexpr, BN: tl.constexpr):
    """Return the expert of a row tile, its rows, a mask of the rows that belong to the expert, and the columns."""
    rows = tl.load(tile_begin + tile) + tl.arange(0, BM)
    here = rows < tl.load(tile_end + tile)
    return tl.load(tile_expert + tile), rows.to(tl.int64), here, column * BN + tl.arange(0, BN)


@triton.jit
def _weight_tile(w, row, column, rows, columns, STRIDE):
    """Return a tile of a ``[rows, columns]`` weight.

    ``row`` and ``column`` are the indices of the tile's elements, shaped to broadcast.
    """
    inside = (row < rows) & (column < columns)
    return tl.load(w + row.to(tl.int64) * STRIDE + column, mask=inside, other=0)


@triton.jit(do_not_specialize=("tiles",), do_not_specialize_on_alignment=UNALIGNED)
def up_kernel(
    x, p, w1_at, h, a, tile_expert, tile_begin, tile_end, tiles, H, F,
    KIND: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute ``h = x W1^T`` and ``a = act(h) p``; ``reference.py`` explains the letters.

    For a gated activation, a program computes the same columns of the gate and of the linear half of h.
    """
    tile, column = _place(tiles, F, BN, GROUP)
    expert, rows, here, columns = _tile(tile, column, tile_expert, tile_begin, tile_end, BM, BN)
    w1 = _at(w1_at, expert, DTYPE)
    G = 2 * F if GATED else F
    gate = tl.zeros((BM, BN), dtype=tl.float32)
    linear = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, H, BK):
        inner = k + tl.arange(0, BK)
        x_tile = tl.load(x + rows[:, None] * H + inner[None, :], mask=here[:, None] & (inner < H)[None, :], other=0)
        w_tile = _weight_tile(w1, columns[None, :], inner[:, None], F, H, H)
        gate = _dot(x_tile, w_tile, gate)
        if GATED:
            w_tile = _weight_tile(w1, (F + columns)[None, :], inner[:, None], G, H, H)
            linear = _dot(x_tile, w_tile, linear)
    inside = here[:, None] & (columns < F)[None, :]
    h_tile = h + rows[:, None] * G + columns[None, :]
    gate = narrow(gate, DTYPE)
    tl.store(h_tile, gate, mask=inside)
    value = _activate(gate.to(tl.float32), KIND)
    if GATED:
        linear_ = narrow(linear, DTYPE)
        tl.store(h_tile + F, linear_, mask=inside)
        value *= linear_.to(tl.float32)
    p_rows = tl.load(p + rows, mask=here, other=0).to(tl.float32)
    tl.store(a + rows[:, None] * F + columns[None, :], narrow(value * p_rows[:, None], DTYPE), mask=inside)


@triton.jit(do_not_specialize=("tiles",), do_not_specialize_on_alignment=UNALIGNED)
def product_kernel(
    left, w_at, out, tile_expert, tile_begin, tile_end, tiles, K, N, stride,
    TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute ``left W`` for weights ``[K, N]``, or ``left W^T`` for weights ``[N, K]``.

    Rows of a weight are ``stride`` elements apart.
    """
    tile, column = _place(tiles, N, BN, GROUP)
    expert, rows, here, columns = _tile(tile, column, tile_expert, tile_begin, tile_end, BM, BN)
    w = _at(w_at, expert, DTYPE)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        inner = k + tl.arange(0, BK)
        l_tile = tl.load(left + rows[:, None] * K + inner[None, :], mask=here[:, None] & (inner < K)[None, :], other=0)
        if TRANSPOSED:
            w_tile = _weight_tile(w, columns[None, :], inner[:, None], N, K, stride)
        else:
            w_tile = _weight_tile(w, inner[:, None], columns[None, :], K, N, stride)
        total = _dot(l_tile, w_tile, total)
    inside = here[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], narrow(total, DTYPE), mask=inside)


@triton.jit
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _through_activation(
    da, h, p_rows, dh, a, rows, a_rows, here, is_active, columns, F,
    KIND: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store ``dh`` and ``a`` for some columns, and return what these columns add to ``dp``, a sum over columns."""
    G = 2 * F if GATED else F
    inside = here[:, None] & (columns < F)[None, :]
    place = rows[:, None] * G + columns[None, :]
    gate = tl.load(h + place, mask=inside, other=0).to(tl.float32)
    activated = _activate(gate, KIND)
    scaled = da * p_rows[:, None]
    if GATED:
        linear = tl.load(h + place + F, mask=inside, other=0).to(tl.float32)
        tl.store(dh + place + F, narrow(scaled * activated, DTYPE), mask=inside)
        tl.store(dh + place, narrow(scaled * linear * _derivative(gate, KIND), DTYPE), mask=inside)
        dp = tl.sum(da * activated * linear, 1)
        activated *= linear
    else:
        tl.store(dh + place, narrow(scaled * _derivative(gate, KIND), DTYPE), mask=inside)
        dp = tl.sum(da * activated, 1)
    a_tile = narrow(activated * p_rows[:, None], DTYPE)
    tl.store(a + a_rows[:, None] * F + columns[None, :], a_tile, mask=inside & is_active)
    return dp


@triton.jit(do_not_specialize=("tiles", "tokens"), do_not_specialize_on_alignment=UNALIGNED)
def hidden_gradient_kernel(
    dy, h, p, w2_at, dh, a, dp_parts, tile_expert, tile_begin, tile_end, offsets, active_offsets,
    tiles, tokens, H, F, KIND: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute ``da = dy W2`` in registers; from ``da`` compute ``dh``, ``a``, and this tile's part of the sum ``dp``.

    ``reference.py`` explains the letters. ``dp_parts`` is ``[column tiles, tokens]``. The launcher sums the parts in a
    fixed order; atomics would add in any order.
    ``a`` has only the rows of active experts. A mask, not a constant, tells whether the expert of a tile is active, so
    frozen and active experts run the same machine code.
    """
    tile, column = _place(tiles, F, BN, GROUP)
    expert, rows, here, columns = _tile(tile, column, tile_expert, tile_begin, tile_end, BM, BN)
    w2 = _at(w2_at, expert, DTYPE)
    da = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, H, BK):
        inner = k + tl.arange(0, BK)
        dy_tile = tl.load(dy + rows[:, None] * H + inner[None, :], mask=here[:, None] & (inner < H)[None, :], other=0)
        w_tile = _weight_tile(w2, inner[:, None], columns[None, :], H, F, F)
        da = _dot(dy_tile, w_tile, da)
    p_rows = tl.load(p + rows, mask=here, other=0).to(tl.float32)
    a_begin = tl.load(active_offsets + expert)
    # Compared as a block: the interpreter of Triton 3.9 refuses a comparison of scalars as a mask.
    is_active = tl.broadcast_to(a_begin, (BM, 1)) < tl.load(active_offsets + expert + 1)
    a_rows = rows - tl.load(offsets + expert) + a_begin
    # Half of the columns at a time, because da, h, activation and derivative of all columns do not fit into registers.
    left, right = _halves(da, BM, BN)
    first = column * BN + tl.arange(0, BN // 2)
    dp = _through_activation(
        left, h, p_rows, dh, a, rows, a_rows, here, is_active, first, F, KIND, GATED, DTYPE
    )  # fmt: skip
    dp += _through_activation(
        right, h, p_rows, dh, a, rows, a_rows, here, is_active, first + BN // 2, F, KIND, GATED, DTYPE
    )  # fmt: skip
    tl.store(dp_parts + column.to(tl.int64) * tokens + rows, dp, mask=here)


@triton.jit
def weight_gradient_kernel(
    left, right, out_at, left_offsets, right_offsets, M, N,
    ACCUMULATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute ``left^T right`` over the rows of each expert, ``[M, N]`` in FP32; skip experts whose ``out_at`` is 0."""
    expert = tl.program_id(1)
    address = tl.load(out_at + expert)
    if address == 0:
        return
    out = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    across = tl.cdiv(N, BN)
    rows = tl.program_id(0) // across * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BN + tl.arange(0, BN)
    begin, end = tl.load(left_offsets + expert), tl.load(left_offsets + expert + 1)
    shift = tl.load(right_offsets + expert) - begin
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, end - begin, BK):
        tokens = begin + k + tl.arange(0, BK)
        there = tokens < end
        l_tile = tl.load(left + tokens[None, :] * M + rows[:, None], mask=there[None, :] & (rows < M)[:, None], other=0)
        r_tile = tl.load(
            right + (tokens + shift)[:, None] * N + columns[None, :], mask=there[:, None] & (columns < N)[None, :],
            other=0,
        )  # fmt: skip
        total = _dot(l_tile, r_tile, total)
    place = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if ACCUMULATE:
        total += tl.load(place, mask=inside, other=0)
    tl.store(place, total, mask=inside)
