"""Host memory for snapshots: pages, allocated once, of which each snapshot takes as many as it has bytes for.

Snapshots differ in size, from slot to slot and with every other order of operators. A buffer of the heaviest slot for
each of them would be most of what sparse checkpointing needs; blocks of their exact sizes would leave gaps that nothing
fits into. Pages do neither: a snapshot may be in several pieces, so whatever is free can be used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from moevement_core.device import MOST_AT_ONCE, Device
from moevement_core.snapshot.buffer import Buffer, Extent

PAGE = 64 << 10
"""Bytes."""


def in_pages(nbytes: int) -> int:
    """``nbytes``, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Arena:
    """Pages of host memory, page-locked where a GPU is; only :meth:`grow` allocates. Safe to use from several threads.

    Args:
        device: whose host memory it is.
    """

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        """All of it, bytes."""
        self._device = device
        self._lock = threading.Lock()
        """Entered itself, never through the condition: see :mod:`moevement_core.gate`."""
        self._given_back = threading.Condition(self._lock)
        self._growing = threading.Lock()
        self._slabs: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        """Pages in a row that nobody has; no two of one slab touch."""

    @property
    def available(self) -> int:
        """Bytes that nobody has now."""
        return sum(one.nbytes for one in self._free)

    def grow(self, nbytes: int) -> None:
        """Allocate until there are ``nbytes``.

        Raises:
            RuntimeError: there is not so much memory.
        """
        with self._growing:
            more = in_pages(nbytes) - self.nbytes
            if more <= 0:
                return
            # In few pieces: page-locking is paid for by the call.
            slabs = [self._slab(min(MOST_AT_ONCE, more - at)) for at in range(0, more, MOST_AT_ONCE)]
            with self._lock:
                self._slabs += slabs
                self._free = _merged([*self._free, *slabs], self._slabs)
                self.nbytes += more
                self._given_back.notify_all()

    def _slab(self, nbytes: int) -> torch.Tensor:
        slab = self._device.host_empty(nbytes)
        slab.zero_()  # so that the pages are there before the first copy, which would have to wait for them
        return slab

    def reclaim(self, held: Iterable[Buffer]) -> None:
        """All that is in none of ``held``, which are all buffers of this arena, is free.

        After an exception from outside, which may have come between a buffer and whoever was to have it.
        """
        with self._lock:
            self._free = _outside([one.memory for buffer in held for one in buffer.extents], self._slabs)
            self._given_back.notify_all()

    def wait_for(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until so much is free that nobody may have taken again meanwhile; whether that came in time."""
        with self._lock:
            return self._given_back.wait_for(lambda: self.available >= in_pages(nbytes), timeout_s)

    def acquire(self, nbytes: int) -> Buffer | None:
        """A buffer of at least ``nbytes``, in as few pieces as there can be; nothing if there is not so much."""
        wanted = in_pages(nbytes)
        with self._lock:
            if wanted > self.available:
                return None
            free, pieces = list(self._free), list[torch.Tensor]()
            while wanted:
                # The smallest that holds all of it; else the largest.
                fitting = [one for one in free if one.nbytes >= wanted]
                best = min(fitting, key=_nbytes) if fitting else max(free, key=_nbytes)
                taken = min(wanted, best.nbytes)
                pieces.append(best[:taken])
                place = next(at for at, one in enumerate(free) if one is best)
                free[place : place + 1] = [best[taken:]] if taken < best.nbytes else []
                wanted -= taken
            self._free = free  # at once: an exception from outside leaves the one or the other
            return Buffer(*pieces)

    def release(self, buffer: Buffer) -> None:
        """Give back a buffer of this arena; what was given back before is no more."""
        with self._lock:
            extents, buffer.extents = buffer.extents, ()
            self._give_back([extent.memory for extent in extents])

    def release_parts(self, buffer: Buffer, ranges: Iterable[tuple[int, int]]) -> None:
        """Give back the pages that are wholly within ``ranges``: of bytes, first and one after the last, in order."""
        with self._lock:
            for start, end in ranges:
                first, last = in_pages(start), end // PAGE * PAGE
                if first < last:
                    kept, gone = _cut(buffer.extents, first, last)
                    buffer.extents = kept
                    self._give_back(gone)

    def _give_back(self, pieces: Sequence[torch.Tensor]) -> None:
        self._free = _merged([*self._free, *pieces], self._slabs)
        self._given_back.notify_all()


def _nbytes(memory: torch.Tensor) -> int:
    return memory.nbytes


def _merged(free: Sequence[torch.Tensor], slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pieces in the order of addresses, those that touch in one."""
    found = []
    for slab in slabs:
        base, runs = slab.data_ptr(), list[list[int]]()
        for one in sorted((one for one in free if _is_in(one, slab)), key=torch.Tensor.data_ptr):
            start = one.data_ptr() - base
            if runs and runs[-1][1] == start:
                runs[-1][1] += one.numel()
            else:
                runs.append([start, start + one.numel()])
        found += [slab[start:end] for start, end in runs]
    return found


def _outside(taken: Sequence[torch.Tensor], slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What of ``slabs`` is in none of ``taken``."""
    found = []
    for slab in slabs:
        at = 0
        for one in sorted((one for one in taken if _is_in(one, slab)), key=torch.Tensor.data_ptr):
            start = one.data_ptr() - slab.data_ptr()
            found.append(slab[at:start])
            at = start + one.numel()
        found.append(slab[at:])
    return [one for one in found if one.numel()]


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
