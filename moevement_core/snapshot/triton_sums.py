"""Triton kernel for the digest of GPU state: two sums over a tensor's words in one launch.

The module ``whole.py`` defines these sums in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Words that one program of the kernel adds at a time."""
BLOCKS = 32
"""Blocks of words that one program of the kernel adds."""


@triton.jit(do_not_specialize=("words", "place"))
def _sums(
    data, total, words: tl.int64, place: tl.int64,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_WORDS: tl.constexpr, BLOCKS_EACH: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * (BLOCK_WORDS * BLOCKS_EACH)
    first = tl.zeros((BLOCK_WORDS,), dtype=tl.int64)
    second = tl.zeros((BLOCK_WORDS,), dtype=tl.int64)
    for block in range(BLOCKS_EACH):
        at = begin + block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        inside = at < words
        value = tl.load(data + at, mask=inside, other=0).to(tl.int64)
        first += tl.where(inside, (value + 1) * (((at + place) * FIRST) | 1), 0)
        second += tl.where(inside, (value + 2) * (((at + place) * SECOND) | 1), 0)
    # Sums modulo 2^64 do not depend on the order.
    tl.atomic_add(total, tl.sum(first, 0))
    tl.atomic_add(total + 1, tl.sum(second, 0))


def add(words: torch.Tensor, place: int, multipliers: tuple[int, int], total: torch.Tensor) -> None:
    """Add the two index-weighted sums of ``words``, which make up a digest, to ``total``; do not wait for the kernel.

    Args:
        words: uint8, int16, int32 or int64, ``[N]``, contiguous.
        place: index of the first word, counted from 1 over all tensors of the operator.
        multipliers: for each of the two sums, the number by which the kernel multiplies the indices of words.
        total: int64 ``[2]``, on the device of ``words``.
    """
    programs = -(-words.numel() // (BLOCK * BLOCKS))
    if programs:
        _sums[(programs,)](
            words, total, words.numel(), place, FIRST=multipliers[0], SECOND=multipliers[1], BLOCK_WORDS=BLOCK,
            BLOCKS_EACH=BLOCKS,
        )  # fmt: skip
