"""Copies wait until training leaves the network idle."""

from __future__ import annotations

import socket
import threading
import time
from random import Random

import pytest
import torch

from moevement_core.policy.idle import IdleSpans, idle_spans
from moevement_core.replication.interface import bytes_moved
from moevement_core.replication.pace import PATIENCE, PROFILED, Pace, TrafficProfile


@pytest.mark.parametrize("longest_s", [0.002, 0.02])
def test_it_is_learned_when_training_communicates(longest_s: float) -> None:
    """Profile iterations of 100 ms that send in their first half. Threads read the counter at irregular moments."""
    random = Random(7)
    profile, spans = TrafficProfile(), IdleSpans()
    began_s, moved = 1e6, 5 << 30
    for number in range(PROFILED + 1):
        spans = idle_spans(profile.begin(began_s, moved, is_counted=number > 0))
        offset_s = 0.0
        while (offset_s := offset_s + random.uniform(0.001, longest_s)) < 0.1:
            profile.look(began_s + offset_s, moved + int(min(offset_s, 0.05) * 1e9))
            profile.look(began_s + offset_s - 0.0005, moved)  # a late look by another thread
        began_s, moved = began_s + 0.1, moved + 50_000_000
    assert spans.iteration_s == pytest.approx(0.1)
    ((first, last),) = spans.spans
    assert 0.045 < first < 0.055 + longest_s
    assert last == pytest.approx(0.1)


def test_it_is_known_after_some_iterations() -> None:
    pace = Pace(lambda: 0)
    for number in range(PROFILED + 2):
        assert not pace.is_known
        pace.begin(was_quiet=number > 1)
    assert pace.is_known
    noisy = Pace(lambda: 0)
    for _ in range(PATIENCE + 1):
        assert not noisy.is_known
        noisy.begin(was_quiet=False)
    assert noisy.is_known


def test_copies_wait_for_an_idle_span() -> None:
    pace = Pace(lambda: 0)
    pace.spans = IdleSpans(3600.0, ((0.05, 3600.0),))
    asked_s = time.perf_counter()
    pace.begin(was_quiet=True)
    assert 0 < pace.allowed(1 << 30, lambda: False) < 1 << 30
    assert time.perf_counter() - asked_s >= 0.05


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
        return  # this host has no counters, so copies are sent at once
    before = moved()
    receiver = socket.create_server(("127.0.0.1", 0))
    with receiver, socket.create_connection(receiver.getsockname()) as sender:
        sender.sendall(memoryview(torch.zeros(100_000, dtype=torch.uint8).numpy()))
    assert moved() - before >= 100_000
    assert bytes_moved("name.invalid") is None
