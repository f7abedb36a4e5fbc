"""Host memory for snapshots: pages, of which each snapshot takes as many as it has bytes for.

Snapshots differ in size, from slot to slot and with every other order of operators. A buffer of the heaviest slot for
each of them would be most of what sparse checkpointing needs; blocks of their exact sizes would leave gaps that nothing
fits into. Pages do neither: a snapshot may be in several pieces, so whatever is free can be used.

Pages are allocated in slabs, and given back in slabs. Data is never moved: new snapshots stay out of slabs that are to
go, and each of those goes once what is in it was freed.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from moevement_core.device import MOST_AT_ONCE, Device
from moevement_core.snapshot.buffer import Buffer, Extent

PAGE = 64 << 10
"""Bytes."""
SLABS = 64
"""Slabs that an arena grows by at a time, about: few enough that page-locking, which is paid for by the call, is cheap,
and so many that what is free is seldom in a slab with something that is not."""
SMALLEST_SLAB = 1 << 20
"""Bytes."""
GIVEN_BACK_AT_ONCE = 256 << 20
"""Bytes, about, that a call of :meth:`Arena.shrink` gives back at most: a thread of training may make it."""


def in_pages(nbytes: int) -> int:
    """``nbytes``, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


WATCHED = 64
"""Buffers that are acquired before what they took at most is known."""


class Arena:
    """Pages of host memory, page-locked where a GPU is. Safe to use from several threads.

    Args:
        device: whose host memory it is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        """Entered itself, never through the condition: see :mod:`moevement_core.gate`."""
        self._given_back = threading.Condition(self._lock)
        self._resizing = threading.Lock()
        self._slabs: list[torch.Tensor] = []
        """In the order of addresses."""
        self._free: list[torch.Tensor] = []
        """Pages in a row that nobody has; no two of one slab touch."""
        self._leaving: frozenset[int] = frozenset()
        """Addresses of slabs that are given back when they are free."""
        self._most_used = 0
        """Bytes in use at a time since :meth:`watch`, at most."""
        self._acquired = 0
        """Buffers since then."""

    @property
    def nbytes(self) -> int:
        """All of it, bytes."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def available(self) -> int:
        """Bytes that nobody has now."""
        return sum(one.nbytes for one in self._free)

    def grow(self, nbytes: int) -> None:
        """Allocate until there are ``nbytes``.

        Raises:
            RuntimeError: there is not so much memory.
        """
        with self._resizing:
            more = in_pages(nbytes) - self.nbytes
            size = min(MOST_AT_ONCE, max(SMALLEST_SLAB, in_pages(nbytes // SLABS)))
            slabs = [self._slab(min(size, more - at)) for at in range(0, more, size)]
            with self._lock:
                everything = sorted([*self._slabs, *slabs], key=torch.Tensor.data_ptr)
                free = _merged([*self._free, *slabs], everything)
                self._slabs, self._free, self._leaving = everything, free, frozenset()
                self._given_back.notify_all()

    def shrink(self, nbytes: int) -> bool:
        """Give back slabs that are free, a few in a call, as long as ``nbytes`` stay; return whether more would go.

        A slab that holds something is never touched. Those that hold the least are left alone by new buffers as far as
        there is room elsewhere, so that a later call finds them free.
        """
        with self._resizing, self._lock:
            before = self._slabs, self._free
            after = _without_surplus(self._slabs, self._free, self.nbytes - in_pages(nbytes))
            # At once, without a call in between: an exception from outside leaves the one or the other.
            self._slabs, self._free, self._leaving = after
        del before  # the last views of what goes end here, outside the lock
        return bool(self._leaving)

    def watch(self) -> None:
        """See from now on how much is in use at a time; older buffers count as long as somebody has them."""
        with self._lock:
            self._most_used, self._acquired = self.nbytes - self.available, 0

    def fit(self, nbytes: int) -> bool:
        """Give back what is beyond ``nbytes``, and beyond what was in use at a time since :meth:`watch`, once that is
        known; return whether another call may give back more.
        """
        if is_known := self._acquired >= WATCHED:
            nbytes = min(nbytes, self._most_used)
        return self.shrink(nbytes) or not is_known

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
                # The smallest that holds all of it; else the largest. From slabs that stay, while they have any.
                usable = [one for one in free if not self._is_leaving(one)] or free
                fitting = [one for one in usable if one.nbytes >= wanted]
                best = min(fitting, key=_nbytes) if fitting else max(usable, key=_nbytes)
                taken = min(wanted, best.nbytes)
                pieces.append(best[:taken])
                place = next(at for at, one in enumerate(free) if one is best)
                free[place : place + 1] = [best[taken:]] if taken < best.nbytes else []
                wanted -= taken
            self._free = free  # at once: an exception from outside leaves the one or the other
            self._most_used, self._acquired = max(self._most_used, self.nbytes - self.available), self._acquired + 1
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

    def _is_leaving(self, piece: torch.Tensor) -> bool:
        return bool(self._leaving) and self._slabs[_place(piece, self._slabs)].data_ptr() in self._leaving

    def _give_back(self, pieces: Sequence[torch.Tensor]) -> None:
        self._free = _merged([*self._free, *pieces], self._slabs)
        self._given_back.notify_all()


def _nbytes(memory: torch.Tensor) -> int:
    return memory.nbytes


def _without_surplus(
    slabs: Sequence[torch.Tensor], free: Sequence[torch.Tensor], surplus: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], frozenset[int]]:
    """Return slabs and free pieces without some slabs that are free, and addresses of slabs that are to go next.

    Args:
        slabs: in the order of addresses.
        free: pieces that nobody has.
        surplus: bytes that may go.
    """
    used = {slab.data_ptr(): slab.nbytes for slab in slabs}
    for piece in free:
        used[slabs[_place(piece, slabs)].data_ptr()] -= piece.nbytes
    at_once = GIVEN_BACK_AT_ONCE
    gone, leaving = set[int](), set[int]()
    for slab in sorted(slabs, key=lambda slab: used[slab.data_ptr()]):
        if slab.nbytes > surplus:
            continue
        surplus -= slab.nbytes
        if used[slab.data_ptr()] == 0 and at_once > 0:
            at_once -= slab.nbytes
            gone.add(slab.data_ptr())
        else:
            leaving.add(slab.data_ptr())
    staying = [slab for slab in slabs if slab.data_ptr() not in gone]
    # All of a slab that goes is one piece, which begins where it does.
    return staying, [piece for piece in free if piece.data_ptr() not in gone], frozenset(leaving)


def _merged(free: Sequence[torch.Tensor], slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pieces in the order of addresses, those of a slab that touch in one."""
    runs: list[tuple[int, int, int]] = []
    """Slab, first byte in it and one after the last."""
    for piece in sorted(free, key=torch.Tensor.data_ptr):
        place = _place(piece, slabs)
        start = piece.data_ptr() - slabs[place].data_ptr()
        if runs and runs[-1][::2] == (place, start):
            runs[-1] = (place, runs[-1][1], start + piece.numel())
        else:
            runs.append((place, start, start + piece.numel()))
    return [slabs[place][start:end] for place, start, end in runs]


def _outside(taken: Iterable[torch.Tensor], slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What of ``slabs`` is in none of ``taken``."""
    ends = [0] * len(slabs)
    found = []
    for piece in sorted(taken, key=torch.Tensor.data_ptr):
        place = _place(piece, slabs)
        start = piece.data_ptr() - slabs[place].data_ptr()
        found.append(slabs[place][ends[place] : start])
        ends[place] = start + piece.numel()
    found += [slab[end:] for slab, end in zip(slabs, ends, strict=True)]
    return [one for one in found if one.numel()]


def _place(piece: torch.Tensor, slabs: Sequence[torch.Tensor]) -> int:
    """Return which of ``slabs``, in the order of addresses, ``piece`` is in."""
    return bisect_right(slabs, piece.data_ptr(), key=torch.Tensor.data_ptr) - 1


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
