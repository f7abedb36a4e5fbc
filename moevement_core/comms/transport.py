"""Transport of bytes between ranks outside training. Sends and receives block, so most run on background threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch


class Transport(ABC):
    """Transport of messages between ranks; messages with one sender, receiver and tag stay in order.

    Background threads call the methods. ``peer`` is the rank at the other end.
    """

    @abstractmethod
    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Send the host bytes ``data``, uint8; return when ``data`` may be overwritten.

        Raises:
            RuntimeError: the peer is lost.
        """

    def pace(self, peer: int, tag: int, bytes_per_s: float) -> None:  # noqa: B027, not every transport can
        """Limit the rate of later sends to ``peer`` to ``bytes_per_s``; an infinite rate means no limit."""

    @property
    def parallel_bytes(self) -> int:
        """Fewest bytes for which one :meth:`send` uses all connections to a peer; 0 if there is only one connection."""
        return 0

    @abstractmethod
    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Receive bytes into ``data``, uint8, until it is full.

        Raises:
            RuntimeError: the peer is lost.
        """


class Refusable(ABC):
    """Object in whose methods threads wait for other ranks. After a failure, :func:`refuse` ends these waits."""

    def __init__(self) -> None:
        self._under_way = 0
        with lock:
            self.is_refused = _is_refusing
            _refusable.add(self)

    @abstractmethod
    def shut_down(self) -> None:
        """End every wait with an error at once; the caller holds :data:`lock`."""

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count the ``with`` block as an operation that may wait for another rank, for :func:`drained`.

        Raises:
            RuntimeError: :func:`refuse` was called before.
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
        """Raise RuntimeError if :func:`refuse` was called before."""
        if self.is_refused:
            raise RuntimeError("communication has been aborted")


lock = threading.RLock()
"""Lock of all transports. Code always enters this object, and never the condition :data:`changed` with the same lock.

The docstring of :mod:`moevement_core.util.gate` gives the reason.
"""
changed = threading.Condition(lock)
"""Condition of :data:`lock`. Each change for which a thread of a transport may wait notifies all such threads."""
_refusable: WeakSet[Refusable] = WeakSet()


_is_refusing = False
"""True from :func:`refuse` to :func:`admit`."""


def refuse() -> None:
    """End every wait in all transports, after a failure; their methods then raise RuntimeError.

    The call also affects transports that this process makes later, until :func:`admit`: the main thread may be making
    connections while another thread calls this function.
    """
    global _is_refusing
    with lock:
        _is_refusing = True
        for operation in _refusable:
            operation.is_refused = True
            operation.shut_down()
        changed.notify_all()


def admit() -> None:
    """Let this process make transports again; called when the main thread has left the generation that failed."""
    global _is_refusing
    _is_refusing = False


def drained(timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` seconds for the end of all sends and receives; return True if none is left."""
    with lock:
        return changed.wait_for(lambda: not any(operation._under_way for operation in _refusable), timeout_s)
