"""Host buffers, allocated once and reused."""

from __future__ import annotations

import threading

import torch

from moevement_core.device import Device

ALIGNMENT = 64
"""Of each buffer, in bytes: that of the tensors in it."""


class BufferPool:
    """``count`` host buffers of ``nbytes`` each, page-locked where a GPU is; only :meth:`grow` allocates more.

    Who acquires a buffer owns it until it releases it. Safe to use from several threads.
    """

    def __init__(self, device: Device, count: int, nbytes: int) -> None:
        self.count = 0
        self.nbytes = nbytes
        self._device = device
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self.grow(count)

    def grow(self, count: int) -> None:
        """Allocate more buffers until there are ``count``.

        Raises:
            RuntimeError: there is not so much memory.
        """
        more = count - self.count
        if more <= 0:
            return
        # One piece: page-locking is paid for by the call, and its memory goes when the last buffer does.
        stride = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        slab = self._device.host_empty(more * stride)
        slab.zero_()  # so that the pages are there before the first copy, which would have to wait for them
        with self._lock:
            self._free += [slab[number * stride : number * stride + self.nbytes] for number in range(more)]
            self.count = count

    @property
    def total_bytes(self) -> int:
        """Host memory of all buffers."""
        return self.count * self.nbytes

    @property
    def available(self) -> int:
        """Buffers that nobody owns now."""
        with self._lock:
            return len(self._free)

    def acquire(self) -> torch.Tensor | None:
        """A buffer, uint8 ``[nbytes]``, or nothing if all are taken."""
        with self._lock:
            return self._free.pop() if self._free else None

    def release(self, buffer: torch.Tensor) -> None:
        """Give back a buffer that :meth:`acquire` gave; a buffer of another pool is dropped."""
        with self._lock:
            if buffer.numel() == self.nbytes and all(buffer is not free for free in self._free):
                self._free.append(buffer)
