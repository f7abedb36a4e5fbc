"""How bytes get to a peer: blocking sends and receives on a process group that training never uses."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist


class Transport(ABC):
    """Messages between ranks, in order for each sender, receiver and tag. Called from background threads."""

    @abstractmethod
    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Send host bytes, uint8; returns when the buffer may be reused.

        Raises:
            RuntimeError: the peer is gone.
        """

    @abstractmethod
    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Receive exactly as many bytes as ``data``, uint8, has.

        Raises:
            RuntimeError: the peer is gone.
        """


class GlooTransport(Transport):
    """Over a gloo group of all ranks, made for this alone. Every rank must make it at the same point."""

    def __init__(self, timeout: timedelta = timedelta(days=7)) -> None:
        # A receive waits for the next snapshot however long an evaluation takes; silence is noticed elsewhere.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._refused = False
        self._under_way = 0
        with _posting:
            _transports.add(self)

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        self._wait(lambda: dist.isend(data, dst=peer, group=self._group, tag=tag))

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        self._wait(lambda: dist.irecv(data, src=peer, group=self._group, tag=tag))

    def _wait(self, post: Callable[[], Any]) -> None:
        with _posting:
            if self._refused:
                raise RuntimeError("communication has been aborted")
            work = post()
            self._under_way += 1
        try:
            work.wait()
        finally:
            with _posting:
                self._under_way -= 1
                _posting.notify_all()


_posting = threading.Condition()
_transports: WeakSet[GlooTransport] = WeakSet()


def refuse() -> None:
    """Post nothing more on any transport that is there now.

    What is posted on a gloo group that is being destroyed would wait for ever: nobody tells it that its connection was
    closed. So an abort refuses, breaks the connections, waits with :func:`drained`, and only then destroys groups.
    """
    with _posting:
        for transport in _transports:
            transport._refused = True


def drained(timeout_s: float) -> bool:
    """Wait until everything that was posted is over, with an error or without; whether that came in time."""
    with _posting:
        return _posting.wait_for(lambda: not any(transport._under_way for transport in _transports), timeout_s)
