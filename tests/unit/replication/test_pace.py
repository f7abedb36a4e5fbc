"""Copies that wait until training leaves the network alone."""

from __future__ import annotations

import socket
import threading
import time

import torch

from moevement_core.policy.idle import IdleSpans
from moevement_core.replication.interface import bytes_moved
from moevement_core.replication.pace import PROFILED, Pace


def test_it_is_learned_when_training_communicates_and_copies_wait_for_the_rest() -> None:
    """Iterations of 100 ms, in the first half of which something is moved; what is seen is a counter."""
    moved, began_s = 0, time.perf_counter()

    def counter() -> int:
        nonlocal moved
        if time.perf_counter() - began_s < 0.05:
            moved += 1 << 20
        return moved

    pace = Pace(counter)
    for number in range(PROFILED + 3):
        began_s = time.perf_counter()
        pace.begin(was_quiet=number > 1)
        time.sleep(0.1)
    pace.begin(was_quiet=True)
    assert pace.is_known
    first = pace.spans.spans[0][0]
    assert first > 0, "it begins with what is moved"
    asked_s = time.perf_counter()
    assert 0 < pace.allowed(1 << 30, lambda: False) < 1 << 30
    assert time.perf_counter() - asked_s >= first / 2


def test_what_has_to_hurry_does_not_wait() -> None:
    pace = Pace(lambda: 0)
    pace.spans = IdleSpans(3600.0, ((3599.0, 3600.0),))
    assert pace.allowed(123, lambda: True) == 123
    hurry = threading.Event()
    threading.Timer(0.05, hurry.set).start()
    assert pace.allowed(123, hurry.is_set) == 123


def test_chunks_fit_into_what_is_left_of_a_span() -> None:
    pace = Pace(lambda: 0)
    pace.sent(1 << 30, 1.0)
    pace.spans = IdleSpans(3600.0, ((0.0, 3600.0),))
    long = pace.allowed(1 << 40, lambda: False)
    pace.spans = IdleSpans(3600.0, tuple((at / 100, (at + 0.9) / 100) for at in range(360_000)))
    assert pace.allowed(1 << 40, lambda: False) < long / 5


def test_the_counters_of_this_host_count_what_goes_over_it() -> None:
    moved = bytes_moved("127.0.0.1")
    if moved is None:
        return  # this host does not tell, and copies are sent at once
    before = moved()
    receiver = socket.create_server(("127.0.0.1", 0))
    with receiver, socket.create_connection(receiver.getsockname()) as sender:
        sender.sendall(memoryview(torch.zeros(100_000, dtype=torch.uint8).numpy()))
    assert moved() - before >= 100_000
    assert bytes_moved("name.invalid") is None
