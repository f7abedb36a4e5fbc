"""Blocks in which a rank sends a snapshot to a holder of parity: consecutive tensors of about 1 MiB together."""

from __future__ import annotations

from functools import lru_cache

from moevement_core.snapshot.snapshot import Entry, Header

BLOCK = 1 << 20
"""Fewest bytes of a block; the last may be smaller. No tensor is split, because its digest covers all its bytes."""


@lru_cache(maxsize=64)
def _blocks(entries: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], ...]:
    blocks: list[tuple[Entry, ...]] = []
    block: list[Entry] = []
    nbytes = 0
    for entry in entries:
        block.append(entry)
        nbytes += entry.nbytes
        if nbytes >= BLOCK:
            blocks.append(tuple(block))
            block, nbytes = [], 0
    return (*blocks, tuple(block)) if block else tuple(blocks)


def blocks_of(header: Header) -> tuple[tuple[Entry, ...], ...]:
    """Return the blocks of a snapshot in the order of sending; sender and receiver compute equal blocks."""
    return _blocks(header.entries)


def block_bytes(block: tuple[Entry, ...]) -> int:
    """Return the bytes of all tensors of ``block``, without gaps."""
    return sum(entry.nbytes for entry in block)
