"""The boundary log keeps sent tensors in order while a recovery may need them, and returns them undamaged."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.errors import RecoveryError
from moevement_core.recovery.boundary_log import BoundaryLog, Direction
from moevement_core.recovery.feed import Feed, feed
from moevement_core.util import log_buffers
from tests.unit.snapshot.loopback import Loopback, Wire

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def log_of(cap_bytes: float = float("inf")) -> tuple[BoundaryLog, list[str]]:
    reports: list[str] = []
    return BoundaryLog(CpuDevice(), lambda: cap_bytes, reports.append), reports


def tensor(iteration: int, order: int, size: int = 6) -> torch.Tensor:
    return torch.randn(2, size // 2, generator=torch.Generator().manual_seed(1000 * iteration + order)).bfloat16()


def fill(log: BoundaryLog, iterations: range, count: int = 4, size: int = 6) -> None:
    for iteration in iterations:
        log.begin(iteration)
        for order in range(count):
            sent = tensor(iteration, order, size)
            log.note(FORWARD, sent)
            log.note(BACKWARD, -sent)
            sent.zero_()  # the schedule frees and reuses what it has sent
        log.end()


def test_it_keeps_what_was_sent_when_it_was_sent() -> None:
    log, _ = log_of()
    fill(log, range(1, 4))
    for iteration in range(1, 4):
        forward, backward = log.sent(iteration, FORWARD), log.sent(iteration, BACKWARD)
        assert forward is not None
        assert backward is not None
        assert [entry.order for entry in forward] == [0, 1, 2, 3]
        for order in range(4):
            assert torch.equal(forward[order].tensor, tensor(iteration, order))
            assert torch.equal(backward[order].tensor, -tensor(iteration, order))
    assert log.iterations == [1, 2, 3]
    assert log.bytes_of_last == 2 * 4 * 12


def test_an_exception_between_any_two_steps_leaves_no_buffer_in_two_places() -> None:
    log, _ = log_of()
    fill(log, range(1, 4))
    before = log.memory_bytes

    third = log._logged[1][FORWARD][2]
    interrupts = Mock(synchronize=Mock(side_effect=KeyboardInterrupt))
    log._logged[1][FORWARD][2] = replace(third, copied=interrupts)
    with pytest.raises(KeyboardInterrupt):
        log.free_before(2)
    log.interrupted()
    assert log.iterations == [2, 3]
    fill(log, range(4, 5))
    for iteration in range(2, 5):  # nothing was overwritten
        sent = log.sent(iteration, FORWARD)
        assert sent is not None
        assert [torch.equal(entry.tensor, tensor(iteration, order)) for order, entry in enumerate(sent)] == [True] * 4
    assert log.memory_bytes <= before, "buffers that are nowhere are not counted"


def test_an_iteration_that_an_exception_cuts_off_is_not_to_be_had() -> None:
    log, _ = log_of()
    fill(log, range(1, 2))
    log.begin(2)
    log.note(FORWARD, tensor(2, 0))
    log.interrupted()
    assert log.iterations == [1]
    log.note(FORWARD, tensor(9, 9))  # an evaluation sends this before iteration 2 begins again
    fill(log, range(2, 3))
    sent = log.sent(2, FORWARD)
    assert sent is not None
    assert [torch.equal(entry.tensor, tensor(2, order)) for order, entry in enumerate(sent)] == [True] * 4


def test_an_iteration_under_way_is_not_told_and_one_begun_again_begins_again() -> None:
    log, _ = log_of()
    fill(log, range(1, 2))
    log.begin(2)
    log.note(FORWARD, tensor(2, 0))
    assert log.sent(2, FORWARD) is None
    assert log.iterations == [1]
    log.begin(2)
    log.note(FORWARD, tensor(2, 1))
    log.end()
    (only,) = log.sent(2, FORWARD) or []
    assert torch.equal(only.tensor, tensor(2, 1))


def test_outside_an_iteration_nothing_is_kept() -> None:
    log, _ = log_of()
    log.note(FORWARD, tensor(0, 0))
    fill(log, range(1, 2))
    log.note(FORWARD, tensor(9, 9))
    assert [len(log.sent(1, direction) or ()) for direction in Direction] == [4, 4]


def test_memory_is_used_again() -> None:
    log, _ = log_of()
    for iteration in range(1, 30):
        fill(log, range(iteration, iteration + 1))
        log.free_before(iteration - 2)
    assert log.iterations == [27, 28, 29]
    assert log.memory_bytes == 4 * 8 * 12, "three iterations and the one under way"


def test_memory_is_allocated_for_an_iteration_at_a_time_and_no_more_than_it_sends() -> None:
    log, _ = log_of()
    allocated = list[int]()
    original = log._buffers._device.host_empty

    def host_empty(nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return original(nbytes)

    log._buffers._device.host_empty = host_empty  # type: ignore[method-assign]
    fill(log, range(1, 5))
    assert allocated == [12] * 8 + [8 * 12] * 3, "the first one by one: nobody knows yet how many there will be"
    assert log.memory_bytes == sum(allocated)
    fill(log, range(5, 6), count=6)
    assert log.memory_bytes == 4 * 8 * 12 + 12 * 12


def test_a_long_iteration_is_allocated_by_calls_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_buffers, "MOST_AT_ONCE", 30)
    log, _ = log_of()
    allocated = list[int]()
    original = log._buffers._device.host_empty

    def host_empty(nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return original(nbytes)

    log._buffers._device.host_empty = host_empty  # type: ignore[method-assign]
    fill(log, range(1, 3))
    assert allocated == [12] * 8 + [24] * 4


def test_two_types_of_one_size_do_not_share_a_buffer() -> None:
    """Check that a view as a wider type begins at a multiple of its element size."""
    log, _ = log_of()
    for iteration in range(1, 4):
        log.begin(iteration)
        for _ in range(3):
            log.note(FORWARD, torch.full((6,), iteration, dtype=torch.bfloat16))
            log.note(FORWARD, torch.full((3,), iteration, dtype=torch.float32))
        log.note(FORWARD, torch.empty(0))
        log.end()
    for iteration in range(1, 4):
        sent = [entry.tensor for entry in log.sent(iteration, FORWARD) or ()]
        assert [entry.dtype for entry in sent[:2]] == [torch.bfloat16, torch.float32]
        assert all((entry == iteration).all() for entry in sent)
        assert sent[-1].numel() == 0


def test_at_its_cap_the_oldest_go_and_that_is_reported_once() -> None:
    log, reports = log_of(cap_bytes=2.5 * 8 * 12)
    fill(log, range(1, 8))
    assert log.iterations == [6, 7]
    assert log.sent(5, FORWARD) is None
    assert log.memory_bytes <= 2.5 * 8 * 12
    assert len(reports) == 1
    assert re.search(r"\b2\.4e-07 GB\b.*\b1\b", reports[0]), "the cap, and the first iteration that goes"


def test_sizes_that_vary_fit_under_the_cap_too() -> None:
    log, _ = log_of(cap_bytes=1000)
    for iteration, size in enumerate([6, 40, 6, 80, 20, 6], start=1):
        fill(log, range(iteration, iteration + 1), size=size)
        assert log.memory_bytes <= 1000 or log.iterations == [iteration]
    assert torch.equal((log.sent(6, FORWARD) or [])[3].tensor, tensor(6, 3))


def test_a_neighbour_feeds_what_it_sent() -> None:
    wire, (log, _) = Wire(), log_of()
    fill(log, range(1, 4))
    with ThreadPoolExecutor(2) as threads:
        sent = [
            threads.submit(feed, 0, 1, direction, [2, 3], log, Loopback(wire, 0)) for direction in (FORWARD, BACKWARD)
        ]
        feeds = {direction: Feed(0, direction, Loopback(wire, 1)) for direction in (FORWARD, BACKWARD)}
        for iteration in (2, 3):
            for receiver in feeds.values():
                receiver.begin(iteration)
            for order in range(4):
                assert torch.equal(feeds[BACKWARD].next(), -tensor(iteration, order))
                assert torch.equal(feeds[FORWARD].next(), tensor(iteration, order))
        assert [future.result() for future in sent] == [96, 96]


@pytest.mark.parametrize("wrong", ["damaged", "another iteration"])
def test_what_is_not_what_was_sent_then_is_refused(wrong: str) -> None:
    wire, (log, _) = Wire(), log_of()
    fill(log, range(1, 3))

    def flip(source: int, peer: int, data: torch.Tensor) -> torch.Tensor:
        if wrong == "damaged" and data.numel() == 12:
            data[3] ^= 1
        return data

    wire.damage = flip
    feed(0, 1, FORWARD, [1], log, Loopback(wire, 0))
    received = Feed(0, FORWARD, Loopback(wire, 1))
    received.begin(1 if wrong == "damaged" else 2)
    with pytest.raises(RecoveryError, match=r"\brank 0\b.*\btensor 0\b.*\biteration 1\b"):
        received.next()


def test_what_memory_did_to_a_tensor_after_it_was_logged_is_found() -> None:
    log, _ = log_of()
    fill(log, range(1, 4))
    assert log.damaged(log.iterations) == []  # waits for every digest
    before = log.digest(2)
    assert before is not None
    (log.sent(2, BACKWARD) or [])[3].buffer[1] ^= 16
    assert log.damaged(log.iterations) == [2]
    assert log.digest(2) == before, "it is of what was sent"
    assert log.damaged([1, 3]) == []


def test_damage_is_found_by_who_is_fed_though_it_was_there_before_it_was_sent() -> None:
    wire, (log, _) = Wire(), log_of()
    fill(log, range(1, 2))
    assert log.digest(1) is not None, "its copies are over, and their digests made"
    (log.sent(1, FORWARD) or [])[1].buffer[0] ^= 1
    received = Feed(0, FORWARD, Loopback(wire, 1))
    received.begin(1)
    with ThreadPoolExecutor() as pool:
        feeding = pool.submit(feed, 0, 1, FORWARD, [1], log, Loopback(wire, 0))
        received.next()
        with pytest.raises(RecoveryError, match=r"\brank 0\b.*\btensor 1\b.*\biteration 1\b"):
            received.next()
        feeding.result()


def test_the_digest_of_an_iteration_is_that_of_what_it_sent_and_in_which_order() -> None:
    log, again = log_of()[0], log_of()[0]
    fill(log, range(1, 3))
    fill(again, range(1, 3))
    assert log.digest(1) == again.digest(1) != log.digest(2)
    again.begin(2)
    for order in (1, 0, 2, 3):
        again.note(FORWARD, tensor(2, order))
        again.note(BACKWARD, -tensor(2, order))
    assert again.digest(2) is None, "it is not over"
    again.end()
    assert again.digest(2) != log.digest(2)


def test_it_finds_the_first_value_that_is_not_finite_and_begins_again() -> None:
    log, _ = log_of()
    log.begin(1)
    for order in range(4):
        sent = tensor(1, order)
        log.note(FORWARD, sent)
        log.note(BACKWARD, sent / 0 if order >= 2 else sent)
    assert (log.first_not_finite(FORWARD), log.first_not_finite(BACKWARD)) == (None, 2)
    log.restart_iteration()
    assert log.first_not_finite(BACKWARD) is None
    log.note(FORWARD, tensor(1, 7))
    log.end()
    again = log.sent(1, FORWARD)
    assert again is not None
    assert [torch.equal(entry.tensor, tensor(1, 7)) for entry in again] == [True], "what was computed first is gone"
    assert log.first_not_finite(FORWARD) is None, "no iteration is under way"
