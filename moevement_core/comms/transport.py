"""Transport of bytes to another rank beside training: blocking sends and receives, mostly in the background."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch


class Transport(ABC):
    """Messages between ranks, in order for each sender, receiver and tag. Background threads call the methods."""

    @abstractmethod
    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Send host bytes, uint8; return when the buffer may be reused.

        Raises:
            RuntimeError: the peer is lost.
        """

    def pace(self, peer: int, tag: int, bytes_per_s: float) -> None:  # noqa: B027, not every transport can
        """Spread later sends to ``peer`` over time at ``bytes_per_s``; an infinite rate is no limit."""

    @property
    def parallel_bytes(self) -> int:
        """Bytes that one :meth:`send` needs in order to use all connections to a peer."""
        return 0

    @abstractmethod
    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Receive exactly as many bytes as ``data``, uint8, has.

        Raises:
            RuntimeError: the peer is lost.
        """


class Refusable(ABC):
    """Operations in which threads wait for other ranks, and which an abort ends."""

    def __init__(self) -> None:
        self.is_refused = False
        self._under_way = 0
        with lock:
            _refusable.add(self)

    @abstractmethod
    def shut_down(self) -> None:
        """End every wait with an error at once; called with :data:`lock` held."""

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Mark an operation that may wait for another rank.

        Raises:
            RuntimeError: communication was aborted.
        """
        with lock:
            self.refuse_if_aborted()
            self._under_way += 1
        try:
            yield
        finally:
            with lock:
                self._under_way -= 1
                changed.notify_all()

    def refuse_if_aborted(self) -> None:
        """Raise RuntimeError after an abort."""
        if self.is_refused:
            raise RuntimeError("communication has been aborted")


lock = threading.RLock()
"""Lock that is always entered directly and never through the condition: see :mod:`moevement_core.util.gate`."""
changed = threading.Condition(lock)
"""Condition that is notified of every change that a thread of a transport may wait for."""
_refusable: WeakSet[Refusable] = WeakSet()


def refuse() -> None:
    """End every wait in all present transports, and let no new operation begin in them."""
    with lock:
        for operation in _refusable:
            operation.is_refused = True
            operation.shut_down()
        changed.notify_all()


def drained(timeout_s: float) -> bool:
    """Wait until no operation is under way; return True if that took no longer than ``timeout_s`` seconds."""
    with lock:
        return changed.wait_for(lambda: not any(operation._under_way for operation in _refusable), timeout_s)
