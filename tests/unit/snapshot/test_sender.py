"""Tests of the sender during a pause, and at the end of a job."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import torch

from moevement_core.comms.transport import Transport
from moevement_core.overhead.pause import Pause
from moevement_core.replication.sender import Delivery, Sender
from moevement_core.replication.wire import TO_PEER, Message, MessageKind


class AlwaysFull(Transport):
    """Peer whose memory is never free again, because the job agrees on no newer window."""

    def __init__(self) -> None:
        self.offered = 0

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        assert tag == TO_PEER
        self.offered += 1

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        data.copy_(Message(MessageKind.FULL, 1).encode())


def test_a_peer_that_has_no_room_is_not_asked_for_ever() -> None:
    lost: list[Any] = []
    reports: list[str] = []
    transport = AlwaysFull()
    sender = Sender(0, 1, transport, lambda *_: None, lost.append, reports.append)
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
    assert re.search(r"\bpeer 1\b.*\bsnapshot 7\b.*\brank 0\b.*\bfull\b.*\b1\b", reports[0])


class Taking(Transport):
    """Peer that accepts the snapshot that it is offered."""

    def __init__(self) -> None:
        self.payload_bytes = 0
        self._answers = [MessageKind.GO, MessageKind.KEPT]

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        if data.numel() > 1000:
            self.payload_bytes += data.numel()

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        data.copy_(Message(self._answers.pop(0), 1).encode())


def test_nothing_is_sent_in_a_pause() -> None:
    transport, pause, kept = Taking(), Pause(), list[Any]()
    pause.begin(60.0)
    sender = Sender(
        0, 1, transport, lambda snapshot, peer: kept.append(snapshot), lambda _: None, lambda _: None, pause=pause
    )
    payload = torch.zeros(1 << 20, dtype=torch.uint8)
    snapshot: Any = SimpleNamespace(
        iteration=7, nbytes=payload.numel(),
        packed=lambda: (SimpleNamespace(encode=lambda: b"header", payload_bytes=payload.numel()), [payload]),
    )  # fmt: skip
    sender.deliver(Delivery(snapshot, lambda: snapshot, lambda: None))
    time.sleep(0.05)
    assert transport.payload_bytes == 0
    assert pause.end()
    assert sender.close(10.0)
    assert transport.payload_bytes == payload.numel()
    assert kept == [snapshot]


def test_the_end_of_the_job_waits_for_no_pause() -> None:
    transport, pause = Taking(), Pause()
    pause.begin(600.0)
    sender = Sender(0, 1, transport, lambda *_: None, lambda _: None, lambda _: None, pause=pause)
    snapshot: Any = SimpleNamespace(
        iteration=7, nbytes=4,
        packed=lambda: (SimpleNamespace(encode=lambda: b"header", payload_bytes=4), [torch.zeros(4)]),
    )  # fmt: skip
    sender.deliver(Delivery(snapshot, lambda: snapshot, lambda: None))
    assert sender.close(10.0)
