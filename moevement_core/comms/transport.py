"""Transport of bytes to another rank beside training: blocking sends and receives, most of them in
background threads.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch


class Transport(ABC):
    """Messages between ranks, in order for each sender, receiver and tag. Called from background threads."""

    @abstractmethod
    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Send host bytes, uint8; returns when the buffer may be reused.

        Raises:
            RuntimeError: the peer is gone.
        """

    def pace(self, peer: int, tag: int, bytes_per_s: float) -> None:  # noqa: B027, not every transport can
        """Spread what :meth:`send` brings to ``peer`` from now on over time; at an infinite rate nothing waits."""

    @property
    def parallel_bytes(self) -> int:
        """Bytes that one :meth:`send` has to bring for all connections to a peer to be used."""
        return 0

    @abstractmethod
    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Receive exactly as many bytes as ``data``, uint8, has.

        Raises:
            RuntimeError: the peer is gone.
        """


class Refusable(ABC):
    """Operation in which other threads wait, and from which an abort frees them."""

    def __init__(self) -> None:
        self.is_refused = False
        self._under_way = 0
        with lock:
            _refusable.add(self)

    @abstractmethod
    def shut_down(self) -> None:
        """End every wait in it with an error, now; called with :data:`lock` held."""

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around everything that may wait for another rank.

        Raises:
            RuntimeError: it was refused.
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
        """Raises RuntimeError after an abort."""
        if self.is_refused:
            raise RuntimeError("communication has been aborted")


lock = threading.RLock()
"""Entered itself, never through the condition: see :mod:`moevement_core.util.gate`."""
changed = threading.Condition(lock)
"""Notified of whatever somebody may wait for in a transport."""
_refusable: WeakSet[Refusable] = WeakSet()


def refuse() -> None:
    """End what waits in any transport that is there now, and let nothing begin there any more."""
    with lock:
        for operation in _refusable:
            operation.is_refused = True
            operation.shut_down()
        changed.notify_all()


def drained(timeout_s: float) -> bool:
    """Wait until everything that was under way is over, with an error or without; whether that came in time."""
    with lock:
        return changed.wait_for(lambda: not any(operation._under_way for operation in _refusable), timeout_s)
