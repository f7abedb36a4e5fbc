"""Memory for what is received of a member before it is added to a sum: of a few blocks at a time, for all members."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

AT_ONCE = 2
"""Blocks: one is received while another is added. Tensors are not cut, and a group of nine would have one each."""


class Staging:
    """Staging memory of one group. May be used from any thread."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(AT_ONCE)
        self._buffers: list[torch.Tensor] = []

    @contextmanager
    def of(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Host memory, uint8 ``[nbytes]``; waits while as many others have some as there may be."""
        with self._free:
            # A list's append and pop are atomic; an exception in between costs one allocation.
            buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
            if buffer.numel() < nbytes:
                buffer = torch.empty(nbytes, dtype=torch.uint8)
            try:
                yield buffer[:nbytes]
            finally:
                self._buffers.append(buffer)
