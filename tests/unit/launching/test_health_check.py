"""Health command of a node: what it reports when it fails, cannot start or hangs, and that it is asked again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moevement_core.launching.health_check import MOST, HealthCheck

WAIT_S = 30.0


def until(check: HealthCheck, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        check.step()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("exit 3", ("3",)), ("echo first; echo second >&2; echo; exit 1", ("1", "second")), ("kill -9 $$", ("-9",)),
        ("/nowhere/check", ("127", "/nowhere/check")), ("sleep 60", ("0.2 s",)),
        ("printf 'x%.0s' $(seq 1 500); exit 1", ("x" * MOST,)), ("printf '\\377'; exit 1", ("1",)),
    ],
)  # fmt: skip
def test_a_failure_has_its_reason(command: str, named: tuple[str, ...]) -> None:
    check = HealthCheck(command, "n1", period_s=WAIT_S, limit_s=0.2 if "sleep" in command else WAIT_S)
    until(check, lambda: bool(check.reason))
    check.close()
    assert all(word in check.reason for word in named), check.reason
    assert len(check.reason) < MOST + 50


def test_a_node_gets_well_again(tmp_path: Path) -> None:
    """Fail while a file is there; the command knows its node."""
    ill, runs = tmp_path / "n1", tmp_path / "runs"
    ill.touch()
    command = f"echo run >> {runs}; test ! -e {tmp_path}/$MOEVEMENT_NODE"
    check = HealthCheck(command, "n1", period_s=0.05)
    until(check, lambda: bool(check.reason))
    ill.unlink()
    until(check, lambda: not check.reason)
    check.close()
    assert len(runs.read_text().splitlines()) > 1
