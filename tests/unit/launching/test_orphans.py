"""Orphans of ended ranks are killed and collected, and all other processes are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moevement_core.launching import orphans
from moevement_core.launching.orphans import Orphans
from moevement_core.util.environment import MEMBER_ENV, PARENT_ENV


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
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the process has ended, and waits to be collected
    looking = Orphans()
    assert not looking.is_due
    looking.expect()
    assert looking.is_due
    looking.step(started_pids=(), living=())
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("living", [True, False])
def test_what_a_process_that_ended_had_started_is_ended(living: bool, left: subprocess.Popen[bytes]) -> None:
    looking, members = Orphans(), {3} if living else {4}
    looking.expect()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if looking.is_due:
            looking.step(started_pids=(), living=members)
        time.sleep(0.02)
    assert (left.poll() is None) == living


HOLDS = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(60)"


def holder(device: Path, member: int) -> subprocess.Popen[bytes]:
    """Start an orphan of a member that has a device open; return its process."""
    environment = {**os.environ, MEMBER_ENV: str(member), PARENT_ENV: str(os.getpid())}
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(device)], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_what_holds_the_device_of_a_rank_that_ended_is_ended_before_the_death_is_reported(
    tmp_path: Path, left: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that only the orphan with an open device is killed, and at once.

    An orphan without a device lives on, and so does a process that a live rank has started.
    """
    monkeypatch.setattr(orphans, "DEVICE_FILES", str(tmp_path / "nvidia*"))
    monkeypatch.setattr(orphans, "RELEASE_S", 60.0)
    monkeypatch.setattr(orphans, "GRACE_S", 60.0)
    looking = Orphans()
    assert looking.release_device(3, started_pids=()), "a machine without such devices"
    (device := tmp_path / "nvidia0").touch()
    own, others = holder(device, 3), holder(device, 4)
    try:
        deadline = time.monotonic() + 30
        while not looking.release_device(3, started_pids=()) and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(ProcessLookupError):
            os.kill(own.pid, 0)
        assert (left.poll(), others.poll()) == (None, None)
    finally:
        others.kill()
        for process in (own, others):
            process.wait()


def test_an_orphan_that_lists_no_files_any_more_is_still_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an orphan as it is while it ends: the driver frees the device, but the process shows no open file."""
    monkeypatch.setattr(orphans, "DEVICE_FILES", str(tmp_path / "nvidia*"))
    monkeypatch.setattr(orphans, "RELEASE_S", 60.0)
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    (device := tmp_path / "nvidia0").touch()
    own, looking = holder(device, 3), Orphans()
    try:
        assert not looking.release_device(3, started_pids=())
        monkeypatch.setattr(orphans, "_holds_device", lambda process: False)
        assert not looking.release_device(3, started_pids=())
        own.kill()
        os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
        assert looking.release_device(3, started_pids=())
    finally:
        own.kill()
        own.wait()


def test_a_device_that_is_not_let_go_holds_back_a_death_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an orphan that does not end when it is killed, because the driver holds it."""
    monkeypatch.setattr(orphans, "DEVICE_FILES", str(tmp_path / "nvidia*"))
    monkeypatch.setattr(orphans, "RELEASE_S", 0.2)
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    (device := tmp_path / "nvidia0").touch()
    own, looking = holder(device, 3), Orphans()
    try:
        assert not looking.release_device(3, started_pids=())
        time.sleep(0.3)
        assert looking.release_device(3, started_pids=())
    finally:
        own.kill()
        own.wait()
