"""Memory for received blocks of snapshots, until a receiver has checked them and added them to a group's parity."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

AT_ONCE = 2
"""Most blocks of a group in this memory at a time: one that is being received, and one that is being added.

Without a limit there could be a block of each member, and a block may be as large as the largest tensor.
"""


class Staging:
    """Memory for received blocks of one parity group. Any thread may use it."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(AT_ONCE)
        self._buffers: list[torch.Tensor] = []

    @contextmanager
    def of(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend host memory, uint8 ``[nbytes]``; wait while :data:`AT_ONCE` other blocks are lent."""
        with self._free:
            # append and pop of a list are atomic. An exception between the two only costs one more allocation.
            buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
            if buffer.numel() < nbytes:
                buffer = torch.empty(nbytes, dtype=torch.uint8)
            try:
                yield buffer[:nbytes]
            finally:
                self._buffers.append(buffer)
