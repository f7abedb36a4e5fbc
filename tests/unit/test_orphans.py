"""What processes leave behind is collected, whoever had its number before, and what is none of theirs is let alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_core.launching import orphans
from moevement_core.launching.orphans import Orphans
from moevement_core.rendezvous.status_page import PAGE_ENV


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "LOOK_S", 0.0)
    monkeypatch.setattr(orphans, "GRACE_S", 0.2)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, PAGE_ENV: str(tmp_path / "status_3")}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    yield process
    process.kill()
    process.wait()


def test_what_has_ended_is_collected(tmp_path: Path) -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    time.sleep(0.2)
    looking = Orphans(tmp_path)
    assert not looking.is_due
    looking.expect()
    assert looking.is_due
    looking.step(ours=(), living=())
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("living", [True, False])
def test_what_a_process_that_ended_had_started_is_ended(
    living: bool, tmp_path: Path, left: subprocess.Popen[bytes]
) -> None:
    looking, pages = Orphans(tmp_path), {str(tmp_path / "status_3")} if living else set()
    looking.expect()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if looking.is_due:
            looking.step(ours=(), living=pages)
        time.sleep(0.02)
    assert (left.poll() is None) == living
