"""What processes leave behind is collected, whoever had its number before, and what is none of theirs is let alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from moevement_core.launching import orphans
from moevement_core.launching.orphans import Orphans
from moevement_core.restart.environment import MEMBER_ENV, PARENT_ENV


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "LOOK_S", 0.0)
    monkeypatch.setattr(orphans, "GRACE_S", 0.2)


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, MEMBER_ENV: "3", PARENT_ENV: str(os.getpid())}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    yield process
    process.kill()
    process.wait()


def test_what_has_ended_is_collected() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    time.sleep(0.2)
    looking = Orphans()
    assert not looking.is_due
    looking.expect()
    assert looking.is_due
    looking.step(ours=(), living=())
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("living", [True, False])
def test_what_a_process_that_ended_had_started_is_ended(living: bool, left: subprocess.Popen[bytes]) -> None:
    looking, members = Orphans(), {3} if living else {4}
    looking.expect()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if looking.is_due:
            looking.step(ours=(), living=members)
        time.sleep(0.02)
    assert (left.poll() is None) == living
