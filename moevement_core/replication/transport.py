"""How bytes get to a peer: blocking sends and receives on a process group that training never uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta

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

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        dist.send(data, dst=peer, group=self._group, tag=tag)

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        dist.recv(data, src=peer, group=self._group, tag=tag)
