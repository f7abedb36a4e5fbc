"""Processes share tasks, and the caller never waits for a process that has ended."""

from __future__ import annotations

import os
import signal

import pytest

from moevement_core.errors import ProcessGroupError
from moevement_core.simulator.workers import shared


def _half(number: int) -> tuple[int, bytes]:
    if number == 13:
        raise ValueError("13")
    if number == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return number, bytes(200_000)


def test_results_come_in_the_order_of_tasks_and_errors_and_deaths_are_told() -> None:
    assert [number for number, _ in shared(_half, range(7), 2)] == list(range(7))
    with pytest.raises(ValueError, match="13"):
        shared(_half, [1, 13, 2, 3], 2)
    with pytest.raises(ProcessGroupError, match=rf"\bpid \d+\b.*-{int(signal.SIGKILL)}\b"):
        shared(_half, [17, 1], 2)
