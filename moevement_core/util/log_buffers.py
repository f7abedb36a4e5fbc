"""Host memory for the boundary log: copies of the tensors that a rank sends to other pipeline stages.

Each page-locking call waits for the whole device, so few large allocations cost less than many small ones. Every
iteration of pipeline training sends the same number of tensors of the same few sizes. When a buffer is missing, the log
therefore allocates all buffers of this size for the rest of the iteration in one piece. A log of K iterations then has
K pieces for each size, and takes exactly the memory that the job has planned for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from moevement_core.device import MOST_AT_ONCE, Device

Size = tuple[int, int]
"""Bytes of a buffer, and bytes of one element of the tensor in it. Buffers for other elements are kept apart, because a
view of a tensor may begin only at a multiple of the element's bytes."""


class LogBuffers:
    """Buffers that one boundary log reuses for tensors of equal size; only the training thread calls the methods.

    Args:
        device: device whose host memory is allocated.
    """

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        """Bytes of host memory that are allocated, whether in use or free."""
        self._device = device
        self._pieces: list[tuple[Size, list[torch.Tensor]]] = []
        """Allocated pieces of memory: size of the buffers in a piece, and its buffers."""
        self._free: dict[Size, dict[int, torch.Tensor]] = defaultdict(dict)
        """Free buffers, by size and address."""
        self._taken = Counter[Size]()
        """Number of buffers that the current iteration has taken, by size."""
        self._taken_by_last = Counter[Size]()
        """Number of buffers that the last complete iteration took, by size."""

    def begin_iteration(self) -> None:
        """Begin to count the buffers that the new iteration takes."""
        self._taken.clear()

    def end_iteration(self) -> None:
        """Record how many buffers the ending iteration has taken, as the estimate for the next iteration."""
        self._taken_by_last = self._taken.copy()

    def take(self, nbytes: int, element_bytes: int, most_bytes: float) -> torch.Tensor | None:
        """Return a buffer of ``nbytes`` as uint8: a free buffer, or if there is none, one from newly allocated memory.

        Args:
            nbytes: bytes of the buffer, a multiple of ``element_bytes``.
            element_bytes: bytes of an element of the tensor that the buffer will hold.
            most_bytes: most bytes of host memory that all buffers together may have.

        Returns:
            None if no buffer of this size is free and another one would exceed ``most_bytes``.

        Raises:
            RuntimeError: the host has too little memory.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        size = nbytes, element_bytes
        if not self._free[size]:
            if self.nbytes + nbytes > most_bytes:
                self.trim()
            if self.nbytes + nbytes > most_bytes:
                return None
            self._allocate(size, most_bytes - self.nbytes)
        self._taken[size] += 1
        return self._free[size].popitem()[1]

    def release(self, buffer: torch.Tensor, element_bytes: int) -> None:
        """Make a buffer free again, so that later calls of :meth:`take` may return it."""
        if buffer.numel():
            self._free[buffer.numel(), element_bytes][buffer.data_ptr()] = buffer

    def trim(self) -> None:
        """Free the memory of every piece whose buffers are all free."""
        in_use = [
            (size, buffers)
            for size, buffers in self._pieces
            if any(buffer.data_ptr() not in self._free[size] for buffer in buffers)
        ]
        addresses = {buffer.data_ptr() for _, buffers in in_use for buffer in buffers}
        self._pieces = in_use
        for size in list(self._free):
            free = {address: buffer for address, buffer in self._free.pop(size).items() if address in addresses}
            if free:
                self._free[size] = free
        self._count()

    def reclaim(self, held: Iterable[torch.Tensor]) -> None:
        """Make every buffer free that is not in ``held``.

        The log calls this method after an exception from another thread. If the exception came right after
        :meth:`take`, the log had not stored the buffer yet, and no log entry refers to it.

        Args:
            held: all buffers that are still in use.
        """
        kept = {buffer.data_ptr() for buffer in held}
        self._free.clear()
        for size, buffers in self._pieces:
            self._free[size].update({buffer.data_ptr(): buffer for buffer in buffers if buffer.data_ptr() not in kept})
        self._count()

    def _allocate(self, size: Size, room_bytes: float) -> None:
        """Allocate the buffers that the rest of the iteration needs, or as many as ``room_bytes`` holds; at least one.

        One call allocates at most :data:`~moevement_core.device.MOST_AT_ONCE`, unless a single buffer is larger.
        """
        nbytes = size[0]
        count = max(1, self._taken_by_last[size] - self._taken[size])
        if count * nbytes > room_bytes:
            count = max(1, int(room_bytes // nbytes))
        count = max(1, min(count, MOST_AT_ONCE // nbytes))
        piece = self._device.host_empty(count * nbytes)
        buffers = [piece[start : start + nbytes] for start in range(0, count * nbytes, nbytes)]
        self._pieces.append((size, buffers))
        self._free[size].update({buffer.data_ptr(): buffer for buffer in buffers})
        self._count()

    def _count(self) -> None:
        self.nbytes = sum(size[0] * len(buffers) for size, buffers in self._pieces)
