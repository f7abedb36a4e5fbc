"""Host memory for the boundary log: buffers of the sizes that an iteration sends, allocated for an iteration at a time.

Page-locking is paid for by the call: it waits for the whole device. An iteration of pipeline training sends as many
tensors of the same few sizes as the one before, so memory that is missing is allocated for the rest of an iteration in
one piece. A log that keeps K iterations has K such pieces then, and no byte more than its plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from moevement_core.device import MOST_AT_ONCE, Device

Size = tuple[int, int]
"""Bytes of a buffer and of an element in it: a view of wider elements may not begin at any multiple of the first."""


class LogBuffers:
    """Buffers of exactly the sizes that were asked for, which are used again. For the training thread alone.

    Args:
        device: whose host memory it is.
    """

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        """Host memory that is set aside, in use or not."""
        self._device = device
        self._pieces: list[tuple[Size, list[torch.Tensor]]] = []
        """Allocations of one piece each, as buffers."""
        self._free: dict[Size, dict[int, torch.Tensor]] = defaultdict(dict)
        """Buffers that nobody has, by address."""
        self._taken = Counter[Size]()
        """Number of buffers that the current iteration has taken, by size."""
        self._taken_by_last = Counter[Size]()
        """Number of buffers that the last whole iteration took, by size."""

    def begin_iteration(self) -> None:
        """Count from now on what an iteration takes."""
        self._taken.clear()

    def end_iteration(self) -> None:
        """Expect the next iteration to take what this one took."""
        self._taken_by_last = self._taken.copy()

    def take(self, nbytes: int, element_bytes: int, most_bytes: float) -> torch.Tensor | None:
        """Return a buffer of ``nbytes`` as uint8: a free one, or one of a new piece of memory.

        Args:
            nbytes: a multiple of ``element_bytes``.
            element_bytes: bytes of an element of what will be kept in it.
            most_bytes: how much host memory may be set aside in all.

        Returns:
            None if no buffer of this size is free and there is no room for another.

        Raises:
            RuntimeError: the host has not so much memory.
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

    def give_back(self, buffer: torch.Tensor, element_bytes: int) -> None:
        """Let a buffer be taken again."""
        if buffer.numel():
            self._free[buffer.numel(), element_bytes][buffer.data_ptr()] = buffer

    def trim(self) -> None:
        """Free the memory of all pieces of which nobody has a buffer."""
        in_use = [
            (size, buffers)
            for size, buffers in self._pieces
            if any(buffer.data_ptr() not in self._free[size] for buffer in buffers)
        ]
        left = {buffer.data_ptr() for _, buffers in in_use for buffer in buffers}
        self._pieces = in_use
        for size in list(self._free):
            free = {address: buffer for address, buffer in self._free.pop(size).items() if address in left}
            if free:
                self._free[size] = free
        self._count()

    def reclaim(self, held: Iterable[torch.Tensor]) -> None:
        """Take back every buffer that is not among ``held``, which are all that anybody still has.

        After an exception from outside, which may have come between a buffer and whoever was to have it.
        """
        kept = {buffer.data_ptr() for buffer in held}
        self._free.clear()
        for size, buffers in self._pieces:
            self._free[size].update({buffer.data_ptr(): buffer for buffer in buffers if buffer.data_ptr() not in kept})
        self._count()

    def _allocate(self, size: Size, room_bytes: float) -> None:
        """Allocate buffers for the rest of the iteration, or as many as there is room for, but at least one.

        A call allocates at most :data:`~moevement_core.device.MOST_AT_ONCE`, if one buffer is not larger.
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
