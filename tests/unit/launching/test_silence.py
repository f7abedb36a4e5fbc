"""The launcher of a job without spares reports a hang once, with the rank and its duration."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_core.launching.children import Child, Program, end_all
from moevement_core.launching.silence import SILENT_S, STOPPED_S, HangDetector
from moevement_core.run.run_record import RunRecord
from tests.unit.monitoring.runs import line


@pytest.fixture
def child() -> Iterator[Child]:
    process = Child("rank_0", Program(command=[sys.executable, "-c", "import time; time.sleep(600)"]), {}, None)
    yield process
    end_all([process])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def until(silence: HangDetector, clock: Clock, seconds: float) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.5
        silence.look()


def test_a_stopped_rank_is_named_once_and_again_after_it_went_on(child: Child) -> None:
    reports, clock = list[str](), Clock()
    silence = HangDetector([child], None, reports.append, clock)
    until(silence, clock, 60)
    assert reports == []
    os.kill(child.pid, signal.SIGSTOP)
    wait_until_stopped(child)
    until(silence, clock, STOPPED_S / 2)
    assert reports == []
    until(silence, clock, 10 * STOPPED_S)
    (text,) = reports
    assert re.search(rf"\brank 0\b.*\b{child.pid}\b.*\b15 s\b", text)
    assert f"kill -CONT {child.pid}" in text
    os.kill(child.pid, signal.SIGCONT)
    while child.is_stopped():
        time.sleep(0.01)
    until(silence, clock, 5)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until_stopped(child)
    until(silence, clock, 2 * STOPPED_S)
    assert len(reports) == 2


def wait_until_stopped(child: Child) -> None:
    while not child.is_stopped():
        time.sleep(0.01)


def test_iterations_that_do_not_end_are_said_once(child: Child, tmp_path: Path) -> None:
    reports, clock = list[str](), Clock()
    run = RunRecord(tmp_path)
    run.begin({}, first_iteration=1)
    silence = HangDetector([child], run, reports.append, clock)
    until(silence, clock, 300)
    assert reports == [], "building a model takes as long as it takes"
    for iteration in range(1, 5):
        run.metric(**line(iteration))
        until(silence, clock, 4)
    until(silence, clock, SILENT_S - 10)
    assert reports == [], "nor are twenty iterations over"
    until(silence, clock, 300)
    (text,) = reports
    assert re.search(rf"\b8\d s\b.*\brank 0\b.*\b{child.pid}\b.*\b0%", text)
    run.metric(**line(5))
    until(silence, clock, 300)
    assert len(reports) == 2
