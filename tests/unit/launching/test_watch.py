"""The launcher handles the end of processes; the tests run real processes that do nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from moevement_core.launching import orphans, supervisor
from moevement_core.launching.children import Child, Program, end_all, no_orphans_left
from moevement_core.launching.watch import ReplaceFailedRanks
from moevement_core.rendezvous.coordinator import State
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import MemberInfo
from moevement_core.rendezvous.values import Values
from moevement_core.run.progress import Progress
from moevement_core.util.environment import MEMBER_ENV
from tests.values import LocalValues

WAIT = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit({})"


class Job:
    """Job of two ranks that starts a replacement for each rank that dies."""

    def __init__(self, folder: Path, code: int, lease_s: float = 10.0, first: str = "") -> None:
        self.values = Values()
        self.end = folder / "end"
        self._program = Program(command=[sys.executable, "-c", first + WAIT.format(code), str(self.end)])
        self.children: list[Child] = []
        self.members: list[Member] = []
        self.starts_fail = 0
        self.watch = ReplaceFailedRanks(
            self._start, self.values, dist.HashStore(), 2, 0, 60.0, lease_s, None, Progress(None, None), self.children
        )
        for number, child in enumerate(self.children):
            self.members.append(Member(LocalValues(self.values), MemberInfo(number, child.pid, "host", "node")))
            self.members[-1].join()
        self.enter()

    def enter(self) -> None:
        """Let every member of the next roster acknowledge it."""
        waiting = [threading.Thread(target=member.wait_for_rank, daemon=True) for member in self.members]
        for thread in waiting:
            thread.start()
        while any(thread.is_alive() for thread in waiting):
            assert self.watch.is_running()

    def _start(self, member: int, variables: dict[str, str]) -> Child:
        if self.starts_fail:
            self.starts_fail -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return Child(f"rank_{member}", self._program, {**variables, MEMBER_ENV: str(member)}, None)

    def signal(self, number: int, kind: int) -> None:
        os.kill(self.children[number].pid, kind)
        while kind == signal.SIGKILL and self.children[number].poll() is None:
            time.sleep(0.01)

    def ends(self) -> int:
        self.end.touch()
        try:
            while self.watch.is_running():
                time.sleep(0.01)
        finally:
            end_all(self.children)
        return self.watch.verdict().code


def test_a_rank_that_is_killed_after_the_end_is_no_failure(tmp_path: Path) -> None:
    job = Job(tmp_path, 0)
    for member in job.members:
        member.finished()
    job.signal(1, signal.SIGKILL)
    assert job.ends() == 0
    assert len(job.children) == 2


def test_a_script_that_fails_after_the_end_is_one(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    for member in job.members:
        member.finished()
    assert job.ends() == 1


def test_a_rank_that_is_stopped_loses_its_lease_and_is_killed_and_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path, 0, lease_s=1.0)
    job.signal(1, signal.SIGSTOP)
    began = time.monotonic()
    try:
        while len(job.children) < 3 and time.monotonic() < began + 20:
            assert job.watch.is_running()
        assert len(job.children) == 3
        assert time.monotonic() - began > 0.9
        assert job.children[1].code == -signal.SIGKILL
    finally:
        end_all(job.children)


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACK_OFF_S", 0.05)
    job = Job(tmp_path, 1)
    job.starts_fail = 3
    job.signal(1, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while len(job.children) < 3 and time.monotonic() < deadline:
        assert job.watch.is_running()
    assert (len(job.children), job.starts_fail) == (3, 0)
    end_all(job.children)


HOLDS = """
import os, pathlib, subprocess, sys, time
if (pid := os.fork()) == 0:
    held = open({device!r})
    pathlib.Path({folder!r}, os.environ["MOEVEMENT_MEMBER"]).write_text(str(os.getpid()))
    time.sleep(60)
"""
"""Script of a rank that forks a process with an open device."""


def test_a_death_is_reported_when_what_the_process_left_has_let_go_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a killed rank's orphan ends before the report. Else the replacement finds no device memory."""
    (device := tmp_path / "nvidia0").touch()
    (held := tmp_path / "held").mkdir()
    monkeypatch.setattr(orphans, "DEVICE_FILES", str(tmp_path / "nvidia*"))
    monkeypatch.setattr(orphans, "RELEASE_S", 60.0)
    with no_orphans_left():
        job = Job(tmp_path, 0, first=HOLDS.format(device=str(device), folder=str(held)))
        try:
            deadline = time.monotonic() + 60
            while not (held / "1").exists() or not (held / "1").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            job.signal(1, signal.SIGKILL)
            while not job.watch._coordinator.losses.all:
                assert job.watch.is_running()
                assert time.monotonic() < deadline
            # The kernel may still be ending the process, but it has closed its files.
            files = Path(f"/proc/{(held / '1').read_text()}/fd")
            with suppress(OSError):
                assert str(device) not in {os.readlink(file) for file in files.iterdir()}
        finally:
            end_all(job.children)


def test_a_roster_that_a_death_supersedes_before_it_is_formed_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "enter", lambda self: None)
    job = Job(tmp_path, 0)
    try:
        coordinator = job.watch._coordinator
        while coordinator.state is not State.PROPOSED:
            assert job.watch.is_running()
        os.kill(job.children[1].pid, signal.SIGKILL)
        while coordinator.state is State.PROPOSED:
            assert job.watch.is_running()
        assert coordinator.roster.generation == 0
        assert job.watch.is_running()
        assert not job.watch.wind_down(), "no generation was formed"
    finally:
        end_all(job.children)
