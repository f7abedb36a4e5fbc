"""It is known of the connections of this process whether training has bytes on their way over them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from moevement_core.replication.training_traffic import (
    LIST_SHARE,
    LISTED_EVERY_S,
    SMALL_BYTES,
    USED_S,
    TrainingTraffic,
)
from tests.limits import HANGS_S

HERE = "127.0.0.1"


class Link:
    """A connection of this process to itself, whose receiver reads when it is told to."""

    def __init__(self) -> None:
        with socket.create_server((HERE, 0)) as listener:
            self.sender = socket.create_connection(listener.getsockname())
            self.receiver, _ = listener.accept()
        self.sender.setblocking(False)
        self.sent = 0

    def fill(self) -> None:
        """Send until nothing fits any more, so that bytes wait here."""
        try:
            while True:
                self.sent += self.sender.send(bytes(1 << 16))
        except BlockingIOError:
            pass

    def pass_on(self, nbytes: int) -> None:
        """Send some bytes that are received."""
        self.sender.setblocking(True)
        self.sender.sendall(bytes(nbytes))
        self.sender.setblocking(False)
        self.receiver.recv(nbytes, socket.MSG_WAITALL)

    def drain(self) -> None:
        """Receive all that was sent."""
        self.receiver.recv(self.sent, socket.MSG_WAITALL)
        self.sent = 0

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


class Clock:
    def __init__(self) -> None:
        self.now_s, self.worked_s = 1e6, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.worked_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("moevement_core.replication.training_traffic.time", made)
    return made


def arrives(traffic: TrainingTraffic) -> None:
    """Wait until nothing is on its way: the last acknowledgement comes a moment after the bytes."""
    ends_s = time.monotonic() + HANGS_S
    while traffic.is_leaving:
        assert time.monotonic() < ends_s


def test_bytes_are_on_their_way_until_they_have_arrived(link: Link) -> None:
    link.pass_on(2 * SMALL_BYTES)
    traffic = TrainingTraffic(HERE, set)
    arrives(traffic)
    link.fill()
    assert traffic.is_leaving
    link.drain()
    arrives(traffic)


def test_copies_do_not_count_and_neither_does_another_interface(link: Link) -> None:
    link.pass_on(2 * SMALL_BYTES)
    link.fill()
    assert TrainingTraffic(HERE, set).is_leaving
    assert not TrainingTraffic(HERE, lambda: {link.sender.fileno()}).is_leaving
    assert not TrainingTraffic("127.0.0.2", set).is_leaving


def test_a_connection_counts_from_when_something_goes_over_it(link: Link, clock: Clock) -> None:
    traffic = TrainingTraffic(HERE, set)
    assert not traffic.is_leaving
    link.pass_on(1000)
    clock.now_s += LISTED_EVERY_S
    assert not traffic.is_leaving
    link.fill()
    for after_s in (LISTED_EVERY_S, USED_S / 2):
        clock.now_s += after_s
        assert traffic.is_leaving
    clock.now_s += USED_S / 2
    assert not traffic.is_leaving, "nothing has moved for a minute"


def test_a_connection_that_was_closed_does_not_count(link: Link) -> None:
    link.pass_on(2 * SMALL_BYTES)
    link.fill()
    traffic = TrainingTraffic(HERE, set)
    assert traffic.is_leaving
    link.close()
    assert not traffic.is_leaving


def test_lists_that_take_long_are_made_less_often(clock: Clock) -> None:
    asked, list_s = list[float](), 0.1

    def own() -> set[int]:
        asked.append(clock.now_s)
        clock.worked_s += list_s
        return set()

    traffic = TrainingTraffic(HERE, own)
    for _ in range(1000):
        assert not traffic.is_leaving
        clock.now_s += 1.0
    between = [later - earlier for earlier, later in pairwise(asked)]
    assert between
    assert min(between) == pytest.approx(list_s / LIST_SHARE, rel=0.01)
