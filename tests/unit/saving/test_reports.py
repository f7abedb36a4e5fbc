"""Reports never block the threads that make them, and are dropped if a failure elsewhere explains them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from moevement_core.restart import generation
from moevement_core.saving import reports as reports_module
from moevement_core.saving.reports import Reports


class Clock:
    """Clock that only the test advances, so that a busy machine makes no difference."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(generation, "time", fake_clock)
    monkeypatch.setattr(reports_module, "time", fake_clock)
    monkeypatch.setattr(generation, "_generation", generation.Generation(Mock(), 0))
    return fake_clock


def on_a_thread(body: Callable[[], None]) -> None:
    """Run ``body`` on a thread to its end, while the clock stands still."""
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def wait_for_reports(clock: Clock) -> None:
    """Advance the clock by the time in which a failure is noticed, and wait for the threads that report."""
    clock.now_s += generation.NOTICED_S
    for thread in threading.enumerate():
        if thread.name == "moevement-report":
            thread.join()


def test_a_report_comes_and_does_not_hold_up_who_makes_it(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    reports = Reports(Mock(), 0)
    on_a_thread(lambda: reports.report("refused"))
    assert caplog.messages == []
    wait_for_reports(clock)
    assert caplog.messages == ["refused"]


def test_what_ends_because_a_rank_died_is_not_reported(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    reports = Reports(Mock(), 0)
    on_a_thread(lambda: reports.report("gone"))
    current = generation.generation()
    assert current is not None
    current.abort()
    generation.enter_generation(Mock(), 0)  # before the reporting thread looks again
    wait_for_reports(clock)
    assert caplog.messages == []
    on_a_thread(lambda: reports.report("new"))
    wait_for_reports(clock)
    assert caplog.messages == ["new"]


def test_lines_keep_their_order_whoever_reports_them(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    reports = Reports(Mock(), 0)
    on_a_thread(lambda: reports.report("first"))
    reports.report("second")
    on_a_thread(lambda: reports.report("third"))
    assert caplog.messages == []
    wait_for_reports(clock)
    assert caplog.messages == ["first", "second", "third"], "they wait at the same time"
    reports.report("at once")
    assert caplog.messages[-1] == "at once"


def test_where_there_is_no_thread_to_be_had_it_is_said_by_who_reports_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    clock.now_s = math.inf  # nothing could advance the clock here
    monkeypatch.setattr(threading, "main_thread", lambda: None)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    Reports(Mock(), 0).report("full")
    assert caplog.messages == ["full"]
