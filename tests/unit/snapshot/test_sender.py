"""The sender at the end of a job."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch

from moevement_core.replication.sender import Delivery, Sender
from moevement_core.replication.transport import Transport
from moevement_core.replication.wire import TO_PEER, Kind, Message


class AlwaysFull(Transport):
    """A peer whose buffers are never free again, because no newer window will be agreed on."""

    def __init__(self) -> None:
        self.offered = 0

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        assert tag == TO_PEER
        self.offered += 1

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        data.copy_(Message(Kind.FULL, 1).encode())


def test_a_peer_that_has_no_room_is_not_asked_for_ever() -> None:
    lost: list[Any] = []
    told: list[str] = []
    transport = AlwaysFull()
    sender = Sender(0, 1, transport, lambda *_: None, lost.append, told.append)
    snapshot: Any = SimpleNamespace(
        iteration=7, packed=lambda: (SimpleNamespace(encode=lambda: b"header", payload_bytes=4), [torch.zeros(4)])
    )
    sender.deliver(Delivery(snapshot, lambda: snapshot, lambda: None))
    sender.deliver(Delivery(snapshot, lambda: snapshot, lambda: None))
    while transport.offered < 5:
        pass
    assert not lost, "while the job runs the peer may get room"
    assert sender.close(10.0)
    assert lost == [snapshot, snapshot]
    assert re.search(r"\bpeer 1\b.*\bsnapshot 7\b.*\brank 0\b.*\bfull\b.*\b1\b", told[0])
