"""A pause stops only digests and sends. A thread that has to wait for digests ends the pause."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.overhead.meter import SETTLING, OverheadMeter
from moevement_core.overhead.pause import LONGEST_STEP_S, SHORTEST_STEP_S, Pause
from moevement_core.overhead.quiet import WARM_UP
from moevement_core.snapshot.copies import Capture, copy_engine


def start(engine: object, done: list[Capture]) -> Capture:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    return engine.start((), [(source, [target])], {}, done.append, lambda: None)  # type: ignore[attr-defined]


def test_a_snapshot_is_copied_in_a_pause_and_digested_after_it() -> None:
    pause, done = Pause(), list[Capture]()
    engine = copy_engine(CpuDevice(), pause)
    pause.begin(60.0)
    capture = start(engine, done)
    capture.wait_copied()
    time.sleep(0.02)
    assert capture.digests == []
    assert done == []
    assert pause.end()
    capture.finished.wait()
    assert done == [capture]
    engine.close()


def test_who_waits_for_digests_ends_the_pause() -> None:
    pause, done = Pause(), list[Capture]()
    engine = copy_engine(CpuDevice(), pause)
    pause.begin(60.0)
    capture = start(engine, done)
    engine.settle()
    assert done == [capture]
    assert not pause.end()
    engine.close()


def test_a_pause_ends_by_itself() -> None:
    pause = Pause()
    pause.begin(0.01)
    pause.wait(lambda: False)
    assert not pause.end()


def test_who_must_go_on_does() -> None:
    pause, is_over = Pause(), threading.Event()
    pause.begin(60.0)
    waiting = threading.Thread(target=lambda: pause.wait(is_over.is_set))
    waiting.start()
    is_over.set()
    waiting.join()
    assert pause.end()


def test_only_quiet_iterations_pause_and_one_that_was_cut_short_does_not_count() -> None:
    pause = Pause()
    meter = OverheadMeter(0, pause)
    for iteration in range(1, WARM_UP):
        meter.begin(iteration, 0.0, 0.0)
        assert not pause.is_on
        meter.end(iteration, 1.0, 0.0, 0.0, 0.0)
    meter.begin(WARM_UP, 0.0, 0.0)
    assert pause.is_on
    pause.end()
    meter.end(WARM_UP, 1.0, 0.0, 0.0, 0.0)
    for iteration in range(WARM_UP + 1, WARM_UP + 4):
        meter.begin(iteration, 0.0, 0.0)
        meter.end(iteration, 1.0, 0.0, 0.0, 0.0)
    assert meter.measured() is None


def test_an_interruption_ends_the_pause() -> None:
    pause = Pause()
    meter = OverheadMeter(0, pause)
    meter.begin(WARM_UP, 0.0, 0.0)
    meter.interrupted()
    assert not pause.is_on


def test_a_wait_for_copies_is_a_stall_wherever_it_came_and_counts_once() -> None:
    meter = OverheadMeter(0, Pause())
    for iteration in range(1, WARM_UP + 4):
        meter.begin(iteration, begin_s=0.5, policy_s=0.1, stall_s=0.3)
        meter.end(iteration, step_s=1.2, stall_s=0.2, digest_cpu_s=0.0, send_cpu_s=0.0)
    measured = meter.measured()
    assert measured is not None
    assert measured.quiet_s == pytest.approx(1.0)
    assert (measured.copy, measured.policy, measured.stall) == pytest.approx((0.1, 0.1, 0.5))


def test_threads_look_seldom_at_a_pause_that_lasts_and_soon_at_a_short_one() -> None:
    pause, steps = Pause(), []
    for expected_s in (0.0, 0.02, 0.6, 60.0):
        pause.begin(60.0, expected_s)
        steps.append(pause.step_s)
    assert steps == [SHORTEST_STEP_S, SHORTEST_STEP_S, pytest.approx(0.012), LONGEST_STEP_S]


def test_an_iteration_in_which_windows_change_does_not_count() -> None:
    meter = OverheadMeter(0, Pause())
    changed_at = WARM_UP + 9
    for iteration in range(1, WARM_UP + 16):
        if iteration == changed_at:
            meter.forget()
        meter.begin(iteration, begin_s=50.0 if iteration == changed_at else 0.1, policy_s=0.0)
        meter.end(iteration, step_s=1.0, stall_s=0.0, digest_cpu_s=0.0, send_cpu_s=0.0)
    measured = meter.measured()
    assert measured is not None
    assert measured.copy == pytest.approx(0.1)


def test_the_first_iterations_after_a_failure_do_not_count() -> None:
    meter = OverheadMeter(0, Pause())
    failed_at = WARM_UP + 8
    for iteration in range(1, WARM_UP + 20):
        if iteration == failed_at:
            meter.begin(iteration, 0.1, 0.0)
            meter.interrupted()
        assert meter.is_settling == (iteration <= SETTLING or 0 <= iteration - failed_at < SETTLING)
        is_slow = meter.is_settling
        meter.begin(iteration, begin_s=50.0 if is_slow else 0.1, policy_s=0.0)
        meter.end(iteration, step_s=90.0 if is_slow else 1.0, stall_s=0.0, digest_cpu_s=0.0, send_cpu_s=0.0)
    measured = meter.measured()
    assert measured is not None
    assert (measured.copy, measured.send) == pytest.approx((0.1, 0.0))
