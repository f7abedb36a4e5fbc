"""What threads report holds none of them up, and is left out where a failure elsewhere explains it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from moevement_core.restart import generation
from moevement_core.session.reports import Reports

NOTICED_S = 0.3


@pytest.fixture(autouse=True)
def _in_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "NOTICED_S", NOTICED_S)
    monkeypatch.setattr(generation, "_generation", generation.Generation(Mock(), 0))


def on_a_thread(body: Callable[[], None]) -> float:
    """Seconds that it takes."""
    began_s = time.monotonic()
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return time.monotonic() - began_s


def wait_for_reports() -> None:
    for thread in threading.enumerate():
        if thread.name == "moevement-report":
            thread.join()


def test_a_report_comes_and_does_not_hold_up_who_makes_it(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports(Mock(), 0)
    assert on_a_thread(lambda: reports.report("refused")) < NOTICED_S
    assert caplog.messages == []
    wait_for_reports()
    assert caplog.messages == ["refused"]


def test_what_ends_because_a_rank_died_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports(Mock(), 0)
    on_a_thread(lambda: reports.report("gone"))
    its = generation.generation()
    assert its is not None
    its.abort()
    generation.enter_generation(Mock(), 0)  # before anybody has looked again
    wait_for_reports()
    assert caplog.messages == []
    on_a_thread(lambda: reports.report("new"))
    wait_for_reports()
    assert caplog.messages == ["new"]


def test_lines_keep_their_order_whoever_reports_them(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports(Mock(), 0)
    on_a_thread(lambda: reports.report("first"))
    reports.report("second")
    on_a_thread(lambda: reports.report("third"))
    assert caplog.messages == []
    began_s = time.monotonic()
    wait_for_reports()
    assert time.monotonic() - began_s < 2 * NOTICED_S, "they wait at the same time"
    assert caplog.messages == ["first", "second", "third"]
    reports.report("at once")
    assert caplog.messages[-1] == "at once"


def test_where_there_is_no_thread_to_be_had_it_is_said_by_who_reports_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "main_thread", lambda: None)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    Reports(Mock(), 0).report("full")
    assert caplog.messages == ["full"]
