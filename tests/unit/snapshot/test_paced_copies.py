"""Copies that a background thread issues in chunks, on a device that executes them as late as possible."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch

from moevement_core.device import CudaDevice
from moevement_core.recovery.boundary_log import BoundaryLog, Direction
from moevement_core.snapshot import copies
from moevement_core.snapshot.copies import Capture, CopyEngine, Pair, copy_engine
from tests.unit.snapshot.lazy_device import LazyDevice

CHUNK = 64


class Interrupted(BaseException):
    """Exception like the one that a restart raises."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    engine = copy_engine(LazyDevice())
    yield engine
    if (permits := device_of(engine).permits) is not None:
        permits.release(1000)
    engine.close()


def device_of(engine: CopyEngine) -> LazyDevice:
    device = engine._device  # type: ignore[attr-defined]
    assert isinstance(device, LazyDevice)
    return device


def pairs(*sizes: int) -> list[Pair]:
    """Return live tensors of ``sizes`` bytes, each with two pieces as targets."""
    generator = torch.Generator().manual_seed(sum(sizes))
    live_pairs: list[Pair] = []
    for size in sizes:
        target = torch.zeros(size, dtype=torch.uint8)
        source = torch.randint(1, 256, (size,), dtype=torch.uint8, generator=generator)
        live_pairs.append((source, [target[: size // 3], target[size // 3 :]]))
    return live_pairs


def arrived(live_pairs: list[Pair], expected: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(torch.cat(list(targets)), wanted) for (_, targets), wanted in zip(live_pairs, expected, strict=True)
    )


def start(engine: CopyEngine, beside: list[Pair], done: Callable[[Capture], None] = lambda done: None) -> Capture:
    return engine.start((), beside, {}, done, lambda: None)


def test_no_more_than_two_chunks_are_under_way(engine: CopyEngine) -> None:
    device, live_pairs = device_of(engine), pairs(10, 1000, 1, 0, 64, 333)
    capture = start(engine, live_pairs)
    capture.finished.wait()
    assert capture.error is None
    assert arrived(live_pairs, [source for source, _ in live_pairs])
    assert device.most_under_way_bytes == 2 * CHUNK
    assert sum(device.copied) == capture.nbytes == 1408
    assert max(device.copied) == CHUNK


def test_training_that_waits_has_the_rest_issued_at_once(engine: CopyEngine) -> None:
    """Copy gradients: the stream that overwrites them waits for the copies, but the host does not."""
    device, live_pairs = device_of(engine), pairs(1000, 200)
    expected = [source.clone() for source, _ in live_pairs]
    device.permits = threading.Semaphore(0)  # no copy ends, as far as the background thread can see
    capture = start(engine, live_pairs)
    assert device.is_waited_for.wait(30)
    let = threading.Thread(target=capture.order_after_copies, daemon=True)
    let.start()
    while not capture.is_urgent:
        let.join(0.001)
    device.permits.release()  # a chunk is done, and the thread notices that the rest is urgent
    let.join(30)
    assert not let.is_alive(), "the host goes on"
    assert not capture.copied.is_open, "while copies are under way"
    for source, _ in live_pairs:
        device.issue(source.zero_)
    device.training.synchronize()
    assert not any(source.any() for source, _ in live_pairs)
    assert arrived(live_pairs, expected)
    device.permits.release(100)
    capture.finished.wait()
    assert capture.error is None


def test_copies_begin_at_their_mark(engine: CopyEngine) -> None:
    """Check that an update which training issues after the mark runs beside the copies."""
    device, live_pairs = device_of(engine), pairs(100)
    (source, _), updated = live_pairs[0], list[bool]()
    expected = source + 1
    device.issue(lambda: source.add_(1))
    mark = device.event()
    mark.record()
    device.issue(lambda: updated.append(True))
    engine.start((), live_pairs, {}, lambda done: None, lambda: None, ready=mark).finished.wait()
    assert arrived(live_pairs, [expected])
    assert not updated
    start(engine, pairs(100)).finished.wait()
    assert updated, "without a mark they begin after everything that was issued"


@pytest.mark.parametrize("number", range(1, 6))
def test_a_copy_that_fails_leaves_nothing_that_writes_and_nothing_that_counts(engine: CopyEngine, number: int) -> None:
    device, live_pairs, outcome = device_of(engine), pairs(200, 70), list[Any]()
    device.fails_at = number  # two waits between chunks of 270 bytes, and one at their end
    capture = engine.start((), live_pairs, {}, outcome.append, lambda: outcome.append(device.under_way_bytes))
    capture.finished.wait()
    engine.settle()
    if number > 4:
        assert outcome == [capture]
        return
    assert outcome == [0], "memory is given back when nobody writes into it any more"
    with pytest.raises(RuntimeError, match="CUDA error"):
        capture.wait_copied()
    with pytest.raises(RuntimeError, match="CUDA error"):
        start(engine, live_pairs)
    engine.forget_error()
    again = pairs(200)
    start(engine, again).finished.wait()
    assert arrived(again, [source for source, _ in again])


def interrupted_at(line: int, function: Callable[[], object]) -> bool:
    """Raise an exception at the ``line``-th line of ``copies`` that ``function`` executes; return True if raised."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != copies.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interruption_at_any_line_leaves_no_snapshot_that_counts_and_is_not_whole() -> None:
    counted = 0
    for line in count(1):
        engine = copy_engine(LazyDevice())
        device, at_once, beside = device_of(engine), pairs(5, 90), pairs(100, 300)
        expected = [source.clone() for source, _ in (*at_once, *beside)]
        done: list[Capture] = []

        def begin(
            engine: CopyEngine = engine, at_once: list[Pair] = at_once, beside: list[Pair] = beside,
            done: list[Capture] = done,
        ) -> None:  # fmt: skip
            engine.start(at_once, beside, {}, done.append, lambda: None)

        was_interrupted = interrupted_at(line, begin)
        for source, _ in at_once:
            device.issue(source.zero_)  # training may change these right after it
        engine.settle()
        if done:
            counted += 1
            assert arrived([*at_once, *beside], expected), line
        assert done or was_interrupted
        engine.close()
        if not was_interrupted:
            break
    assert line > 10, "there were lines to interrupt"
    assert counted >= 1


def test_copies_come_before_digests_of_earlier_ones(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that copies of live state, which training waits for, come first."""
    device, digest_of, log = device_of(engine), copies.digest_of, list[str]()
    copy, digests, both_wait = device.copy, threading.Event(), threading.Event()

    def logged_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        log.append("copy")
        copy(target, source)

    def logged_digest(*targets: torch.Tensor) -> str:
        digests.set()
        assert both_wait.wait(30)
        log.append("digest")
        return digest_of(*targets)

    monkeypatch.setattr(device, "copy", logged_copy)
    monkeypatch.setattr(copies, "digest_of", logged_digest)
    start(engine, pairs(30, 30), lambda done: log.append("first"))
    assert digests.wait(30)
    log.clear()
    start(engine, pairs(30), lambda done: log.append("second"))
    both_wait.set()
    engine.settle()
    assert log == ["digest", "copy", "copy", "digest", "first", "digest", "second"]


def test_background_threads_sleep_until_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute digests of a log in a background thread, on a device that refuses threads that spin."""
    log = BoundaryLog(LazyDevice(), lambda: 1e9, lambda text: None)
    log.begin(1)
    log.note(Direction.FORWARD, torch.arange(5.0))
    log.end()
    sent = log.sent(1, Direction.FORWARD)
    assert sent is not None
    assert sent[0].digest == copies.digest_of(torch.arange(5.0).view(torch.uint8))

    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **kwargs: asked.append(kwargs))
    device = CudaDevice.__new__(CudaDevice)
    device.event(sleeps=True)
    device.event(timing=True)
    assert [kwargs["blocking"] for kwargs in asked] == [True, False]
