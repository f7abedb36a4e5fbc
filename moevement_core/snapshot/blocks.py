"""Blocks in which a snapshot is sent into a sum of parity: consecutive tensors, about a MiB together."""

from __future__ import annotations

from functools import lru_cache

from moevement_core.snapshot.snapshot import Entry, Header

BLOCK = 1 << 20
"""Bytes of a block, at least. A tensor is never cut, because its digest covers all of it."""


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
    """Return the tensors of a snapshot in blocks, in order of sending; sender and receiver compute the same."""
    return _blocks(header.entries)


def block_bytes(block: tuple[Entry, ...]) -> int:
    """Return the bytes of all tensors of ``block``, without gaps."""
    return sum(entry.nbytes for entry in block)
