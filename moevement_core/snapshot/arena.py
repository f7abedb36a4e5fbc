"""Host memory for snapshots, divided into pages; each snapshot takes as many pages as its bytes need.

Snapshots differ in size, within a window and after each reorder of operators. If all buffers had the largest size,
sparse checkpointing would need a multiple of the memory. If buffers had exact sizes, freed buffers would leave gaps too
small for any new snapshot. With pages a snapshot may be in several pieces, so it can use any free page.

The arena allocates and releases memory in slabs of many pages. It never moves data. To release a slab that is in use,
it keeps new snapshots out of the slab, and releases the slab once all of its pages are free.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from moevement_core.device import MOST_AT_ONCE, Device
from moevement_core.snapshot.buffer import Buffer, Extent

PAGE = 64 << 10
"""Bytes of a page."""
SLABS = 64
"""Approximate number of slabs by which an arena grows at a time.

With fewer slabs, an arena grows faster, because each page-lock call is slow. With more slabs, it can release more
memory, because it can release a slab only when all pages of the slab are free.
"""
SMALLEST_SLAB = 1 << 20
"""Bytes of the smallest slab."""
RETURNED_AT_ONCE = 256 << 20
"""Approximate limit on the bytes that one call of :meth:`Arena.shrink` releases.

Calls must be short, because the training thread may have to wait for the end of a call.
"""


def in_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


WATCHED = 64
"""Number of buffers that threads must acquire before :meth:`Arena.fit` releases memory beyond the measured peak.

The peak of the bytes in use and the number of buffers count from :meth:`Arena.watch` on.
"""


class Arena:
    """Pages of host memory for snapshots, page-locked if the device is a GPU. Any thread may call any method.

    Args:
        device: device whose host memory is allocated.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        """Lock of the arena. Code writes ``with self._lock``, never ``with self._freed``, the condition on this lock.

        The second form runs Python code between locking and the ``with`` block. The exception of a restart could come
        there, and leave the lock locked forever (:mod:`moevement_core.util.gate`).
        """
        self._freed = threading.Condition(self._lock)
        self._resizing = threading.Lock()
        self._slabs: list[torch.Tensor] = []
        """Slabs in order of addresses."""
        self._free: list[torch.Tensor] = []
        """Free pieces of consecutive pages; no two pieces of one slab are adjacent."""
        self._leaving: frozenset[int] = frozenset()
        """Addresses of slabs that will be released when all of their pages are free."""
        self._most_used = 0
        """Peak of the bytes in use since :meth:`watch`."""
        self._acquired = 0
        """Number of buffers acquired since :meth:`watch`."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the arena has allocated, in use or free."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def available(self) -> int:
        """Bytes of allocated memory that no buffer uses now."""
        return sum(piece.nbytes for piece in self._free)

    def grow(self, nbytes: int) -> None:
        """Allocate slabs until the arena has ``nbytes``.

        Raises:
            RuntimeError: the host has too little memory.
        """
        with self._resizing:
            more = in_pages(nbytes) - self.nbytes
            size = min(MOST_AT_ONCE, max(SMALLEST_SLAB, in_pages(nbytes // SLABS)))
            slabs = [self._slab(min(size, more - at)) for at in range(0, more, size)]
            with self._lock:
                everything = sorted([*self._slabs, *slabs], key=torch.Tensor.data_ptr)
                free = _merged([*self._free, *slabs], everything)
                self._slabs, self._free, self._leaving = everything, free, frozenset()
                self._freed.notify_all()

    def shrink(self, nbytes: int) -> bool:
        """Release free slabs until about ``nbytes`` are allocated; return True if a later call has to release more.

        One call releases about :data:`RETURNED_AT_ONCE` bytes, and never a slab in use. If that is not enough, the call
        marks the slabs with the fewest used bytes. New buffers avoid marked slabs while other slabs have free pages.
        So later calls find more and more of the marked slabs free.
        """
        with self._resizing, self._lock:
            before = self._slabs, self._free
            after = _without_surplus(self._slabs, self._free, self.nbytes - in_pages(nbytes))
            # One assignment without a call: an interruption leaves either the old state or the new one.
            self._slabs, self._free, self._leaving = after
        del before  # the last references to released slabs end here, outside the lock
        return bool(self._leaving)

    def watch(self) -> None:
        """Begin to record the peak of the bytes in use, starting from the bytes that are in use now."""
        with self._lock:
            self._most_used, self._acquired = self.nbytes - self.available, 0

    def fit(self, nbytes: int) -> bool:
        """Release free slabs beyond ``nbytes``, or beyond the peak of the bytes in use if the peak is smaller.

        The peak is measured since :meth:`watch`, and counts only after :data:`WATCHED` buffers were acquired.

        Returns:
            True if a later call may release more.
        """
        if is_known := self._acquired >= WATCHED:
            nbytes = min(nbytes, self._most_used)
        return self.shrink(nbytes) or not is_known

    def _slab(self, nbytes: int) -> torch.Tensor:
        slab = self._device.host_empty(nbytes)
        slab.zero_()  # makes the system map the pages now, so that the first copy does not wait for it
        return slab

    def reclaim(self, held: Iterable[Buffer]) -> None:
        """Free all memory that is in none of the buffers ``held``.

        Called after a failure. The exception that interrupts training may come right after :meth:`acquire`, before the
        caller stores the buffer. No variable then refers to the buffer, so nothing else would ever free it.

        Args:
            held: all buffers of this arena that are in use.
        """
        with self._lock:
            self._free = _outside([extent.memory for buffer in held for extent in buffer.extents], self._slabs)
            self._freed.notify_all()

    def wait_for(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until ``nbytes`` are free; return False if they are not within ``timeout_s`` seconds.

        A True is no promise: another thread may acquire the free bytes before the caller does.
        """
        with self._lock:
            return self._freed.wait_for(lambda: self.available >= in_pages(nbytes), timeout_s)

    def acquire(self, nbytes: int) -> Buffer | None:
        """Return a buffer of at least ``nbytes``, in few pieces; None if fewer bytes are free."""
        wanted = in_pages(nbytes)
        with self._lock:
            if wanted > self.available:
                return None
            free, pieces = list(self._free), list[torch.Tensor]()
            while wanted:
                # Take the smallest piece that holds the rest of the buffer, or else the largest piece. Prefer pieces
                # in slabs that stay.
                usable = [piece for piece in free if not self._is_leaving(piece)] or free
                fitting = [piece for piece in usable if piece.nbytes >= wanted]
                best = min(fitting, key=_nbytes) if fitting else max(usable, key=_nbytes)
                taken = min(wanted, best.nbytes)
                pieces.append(best[:taken])
                place = next(at for at, piece in enumerate(free) if piece is best)
                free[place : place + 1] = [best[taken:]] if taken < best.nbytes else []
                wanted -= taken
            self._free = free  # one assignment: an interruption leaves either the old list or the new one
            self._most_used, self._acquired = max(self._most_used, self.nbytes - self.available), self._acquired + 1
            return Buffer(*pieces)

    def release(self, buffer: Buffer) -> None:
        """Free all pages of ``buffer`` that :meth:`release_parts` has not freed yet."""
        with self._lock:
            extents, buffer.extents = buffer.extents, ()
            self._give_back([extent.memory for extent in extents])

    def release_parts(self, buffer: Buffer, ranges: Iterable[tuple[int, int]]) -> None:
        """Free the pages of ``buffer`` that are wholly within ``ranges``.

        Args:
            buffer: buffer of this arena.
            ranges: first byte and byte after the last byte of each range, in ascending order.
        """
        with self._lock:
            for start, end in ranges:
                first, last = in_pages(start), end // PAGE * PAGE
                if first < last:
                    kept, freed = _cut(buffer.extents, first, last)
                    buffer.extents = kept
                    self._give_back(freed)

    def _is_leaving(self, piece: torch.Tensor) -> bool:
        return bool(self._leaving) and self._slabs[_place(piece, self._slabs)].data_ptr() in self._leaving

    def _give_back(self, pieces: Sequence[torch.Tensor]) -> None:
        self._free = _merged([*self._free, *pieces], self._slabs)
        self._freed.notify_all()


def _nbytes(memory: torch.Tensor) -> int:
    return memory.nbytes


def _without_surplus(
    slabs: Sequence[torch.Tensor], free: Sequence[torch.Tensor], surplus: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], frozenset[int]]:
    """Return the slabs and free pieces that stay, and the addresses of slabs that later calls of ``shrink`` release.

    Args:
        slabs: slabs in order of addresses.
        free: free pieces.
        surplus: bytes that may be released, now or later.
    """
    used = {slab.data_ptr(): slab.nbytes for slab in slabs}
    for piece in free:
        used[slabs[_place(piece, slabs)].data_ptr()] -= piece.nbytes
    at_once = RETURNED_AT_ONCE
    released, leaving = set[int](), set[int]()
    for slab in sorted(slabs, key=lambda slab: used[slab.data_ptr()]):
        if slab.nbytes > surplus:
            continue
        surplus -= slab.nbytes
        if used[slab.data_ptr()] == 0 and at_once > 0:
            at_once -= slab.nbytes
            released.add(slab.data_ptr())
        else:
            leaving.add(slab.data_ptr())
    staying = [slab for slab in slabs if slab.data_ptr() not in released]
    # The free piece of a slab that is wholly free has the address of the slab.
    return staying, [piece for piece in free if piece.data_ptr() not in released], frozenset(leaving)


def _merged(free: Sequence[torch.Tensor], slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the free pieces in order of addresses, with adjacent pieces of one slab joined."""
    runs: list[tuple[int, int, int]] = []
    """Ranges of adjacent free bytes: index of the slab, offset of the first byte in the slab, offset after the last."""
    for piece in sorted(free, key=torch.Tensor.data_ptr):
        place = _place(piece, slabs)
        start = piece.data_ptr() - slabs[place].data_ptr()
        if runs and runs[-1][::2] == (place, start):
            runs[-1] = (place, runs[-1][1], start + piece.numel())
        else:
            runs.append((place, start, start + piece.numel()))
    return [slabs[place][start:end] for place, start, end in runs]


def _outside(taken: Iterable[torch.Tensor], slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of ``slabs`` that no tensor in ``taken`` covers."""
    ends = [0] * len(slabs)
    pieces = []
    for piece in sorted(taken, key=torch.Tensor.data_ptr):
        place = _place(piece, slabs)
        start = piece.data_ptr() - slabs[place].data_ptr()
        pieces.append(slabs[place][ends[place] : start])
        ends[place] = start + piece.numel()
    pieces += [slab[end:] for slab, end in zip(slabs, ends, strict=True)]
    return [piece for piece in pieces if piece.numel()]


def _place(piece: torch.Tensor, slabs: Sequence[torch.Tensor]) -> int:
    """Return the index of the slab that contains ``piece``; ``slabs`` are in order of addresses."""
    return bisect_right(slabs, piece.data_ptr(), key=torch.Tensor.data_ptr) - 1


def _cut(extents: Sequence[Extent], first: int, last: int) -> tuple[list[Extent], list[torch.Tensor]]:
    """Cut bytes ``first`` to ``last`` out of a buffer; return the extents that stay, and the memory cut out."""
    kept, cut = [], []
    for extent in extents:
        start, end = max(extent.start, first), min(extent.end, last)
        if start >= end:
            kept.append(extent)
            continue
        cut.append(extent.memory[start - extent.start : end - extent.start])
        if extent.start < start:
            kept.append(Extent(extent.start, extent.memory[: start - extent.start]))
        if end < extent.end:
            kept.append(Extent(end, extent.memory[end - extent.start :]))
    return kept, cut
