"""Host memory for snapshots: pages, allocated once, of which each snapshot takes as many as it has bytes for.

Snapshots differ in size, from slot to slot and with every other order of operators. A buffer of the heaviest slot for
each of them would be most of what sparse checkpointing needs; blocks of their exact sizes would leave gaps that nothing
fits into. Pages do neither: a snapshot may be in several pieces, so whatever is free can be used.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from moevement_core.device import Device
from moevement_core.snapshot.buffer import Buffer, Extent

PAGE = 64 << 10
"""Bytes."""


def in_pages(nbytes: int) -> int:
    """``nbytes``, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(slots=True, eq=False)
class _Free:
    """Pages in a row that nobody has."""

    address: int
    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class Arena:
    """Pages of host memory, page-locked where a GPU is; only :meth:`grow` allocates. Safe to use from several threads.

    Args:
        device: whose host memory it is.
    """

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        """All of it, bytes."""
        self._device = device
        self._lock = threading.Condition(threading.Lock())
        """Notified of what is given back."""
        self._slabs: list[torch.Tensor] = []
        self._free: list[_Free] = []
        """In the order of addresses; no two of one slab touch."""
        self._available = 0

    @property
    def available(self) -> int:
        """Bytes that nobody has now."""
        return self._available

    def grow(self, nbytes: int) -> None:
        """Allocate until there are ``nbytes``.

        Raises:
            RuntimeError: there is not so much memory.
        """
        more = in_pages(nbytes) - self.nbytes
        if more <= 0:
            return
        # In one piece: page-locking is paid for by the call.
        slab = self._device.host_empty(more)
        slab.zero_()  # so that the pages are there before the first copy, which would have to wait for them
        with self._lock:
            self._slabs.append(slab)
            insort(self._free, _Free(slab.data_ptr(), slab), key=attrgetter("address"))
            self.nbytes += more
            self._available += more

    def wait_for(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until so much is free that nobody may have taken again meanwhile; whether that came in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._available >= in_pages(nbytes), timeout_s)

    def acquire(self, nbytes: int) -> Buffer | None:
        """A buffer of at least ``nbytes``, in as few pieces as there can be; nothing if there is not so much."""
        wanted = in_pages(nbytes)
        with self._lock:
            if wanted > self._available:
                return None
            self._available -= wanted
            pieces = []
            while wanted:
                # The smallest that holds all of it; else the largest.
                fitting = [one for one in self._free if one.nbytes >= wanted]
                best = min(fitting, key=attrgetter("nbytes")) if fitting else max(self._free, key=attrgetter("nbytes"))
                taken = min(wanted, best.nbytes)
                pieces.append(best.memory[:taken])
                wanted -= taken
                if taken == best.nbytes:
                    self._free.remove(best)
                else:
                    best.address, best.memory = best.address + taken, best.memory[taken:]
            return Buffer(*pieces)

    def release(self, buffer: Buffer) -> None:
        """Give back a buffer of this arena; what was given back before is no more."""
        with self._lock:
            extents, buffer.extents = buffer.extents, ()
            self._give_back(extent.memory for extent in extents)

    def release_parts(self, buffer: Buffer, ranges: Iterable[tuple[int, int]]) -> None:
        """Give back the pages that are wholly within ``ranges``: of bytes, first and one after the last, in order."""
        with self._lock:
            for start, end in ranges:
                first, last = in_pages(start), end // PAGE * PAGE
                if first < last:
                    kept, gone = _cut(buffer.extents, first, last)
                    buffer.extents = kept
                    self._give_back(gone)

    def _give_back(self, pieces: Iterable[torch.Tensor]) -> None:
        self._lock.notify_all()
        for memory in pieces:
            self._available += memory.numel()
            slab = next(one for one in self._slabs if _is_in(memory, one))
            start = memory.data_ptr()
            end = start + memory.numel()
            neighbours = [
                one
                for one in self._free
                if (one.address == end or one.address + one.nbytes == start) and _is_in(one.memory, slab)
            ]
            for one in neighbours:
                self._free.remove(one)
                start, end = min(start, one.address), max(end, one.address + one.nbytes)
            at = start - slab.data_ptr()
            insort(self._free, _Free(start, slab[at : at + end - start]), key=attrgetter("address"))


def _is_in(memory: torch.Tensor, slab: torch.Tensor) -> bool:
    return slab.data_ptr() <= memory.data_ptr() < slab.data_ptr() + slab.numel()


def _cut(extents: Sequence[Extent], first: int, last: int) -> tuple[list[Extent], list[torch.Tensor]]:
    """What of ``extents`` is outside bytes ``first`` to ``last`` of their buffer, and what is inside."""
    kept, gone = [], []
    for one in extents:
        start, end = max(one.start, first), min(one.end, last)
        if start >= end:
            kept.append(one)
            continue
        gone.append(one.memory[start - one.start : end - one.start])
        if one.start < start:
            kept.append(Extent(one.start, one.memory[: start - one.start]))
        if end < one.end:
            kept.append(Extent(end, one.memory[end - one.start :]))
    return kept, gone
