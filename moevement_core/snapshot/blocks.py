"""How a snapshot is cut on its way into a sum: tensors that come one after the other, about a MiB at a time."""

from __future__ import annotations

from functools import lru_cache

from moevement_core.snapshot.snapshot import Entry, Header

BLOCK = 1 << 20
"""Bytes, at least; a tensor is not cut, since its digest is of all of it."""


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
    """The tensors of a snapshot, in the order in which they come, in blocks; the same on both sides."""
    return _blocks(header.entries)


def block_bytes(block: tuple[Entry, ...]) -> int:
    """Of all its tensors, one right after the other."""
    return sum(entry.nbytes for entry in block)
