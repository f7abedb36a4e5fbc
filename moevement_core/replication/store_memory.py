"""Host memory of the stores for other ranks' snapshots, as their sources request it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from moevement_core.device import Device
from moevement_core.replication.allowance import Who
from moevement_core.snapshot.arena import Arena


class StoreMemory(ABC):
    """Host memory of one store, or of all stores of a group. Any thread may use it.

    Args:
        key: key of this memory in the :class:`~moevement_core.replication.allowance.Allowance`.
        device: device whose host memory is allocated.
    """

    def __init__(self, key: Who, device: Device) -> None:
        self.key, self.arena = key, Arena(device)
        self.growing = threading.Lock()
        """Lock for changes of this memory. A receiver holds it from its comparison of the allocated and the requested
        memory until it has allocated or freed memory."""

    @property
    def room_bytes(self) -> int:
        """Bytes of host memory promised to the sources: allocated now, or later when a snapshot arrives."""
        return self.arena.nbytes

    def grow(self, nbytes: int) -> None:
        """Allocate memory up to a total of ``nbytes`` bytes.

        Raises:
            RuntimeError: the host has too little memory.
        """
        self.arena.grow(nbytes)

    @abstractmethod
    def need(self, source: int, nbytes: int) -> None:
        """Record that ``source`` needs ``nbytes`` bytes from now on, so that :meth:`trim` may free the rest."""

    @abstractmethod
    def trim(self) -> bool:
        """Free unused memory beyond what the sources need; return True if any was freed.

        One call frees only a part of this memory, so the receiver's thread calls the method after every message.
        """
