"""What the launcher makes of processes that end, with real ones that do nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.moevement.children import Child, Program, end_all
from megatron.moevement.watch import ReplaceWhoDies
from moevement_core.cli.progress import Progress
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import Card

WAIT = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit({})"


class Job:
    """Two ranks, and a process that is started for each that dies."""

    def __init__(self, folder: Path, code: int) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        self.end = folder / "end"
        self._program = Program(command=[sys.executable, "-c", WAIT.format(code), str(self.end)])
        self.children = [self._child(), self._child()]
        self.before_start: Callable[[], None] = lambda: None
        address = ("127.0.0.1", self.store.port)
        self.watch = ReplaceWhoDies(
            self.children, self._start, self.store, address, 2, 60.0, None, Progress(None, None)
        )
        self.members = [
            Member(self.store, Card(one, child.pid, "host", "node")) for one, child in enumerate(self.children)
        ]
        for member in self.members:
            member.join()
        assert self.watch.is_running()
        for member in self.members:
            member.wait_for_rank()

    def _child(self) -> Child:
        return Child("rank", self._program, {}, None)

    def _start(self) -> Child:
        self.before_start()
        return self._child()

    def kill(self, number: int) -> None:
        os.kill(self.children[number].pid, signal.SIGKILL)
        while self.children[number].poll() is None:
            time.sleep(0.01)

    def ends(self) -> int:
        self.end.touch()
        try:
            while self.watch.is_running():
                time.sleep(0.01)
        finally:
            end_all(self.children)
        return self.watch.verdict()


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_rank_that_is_killed_after_the_end_is_no_failure(tmp_path: Path, is_seen_first: bool) -> None:
    """The launcher sees it before or after another rank has said that all have come to the end."""
    job = Job(tmp_path, 0)
    done: Any = job.members[0].done
    if is_seen_first:
        job.before_start = done
    else:
        done()
    job.kill(1)
    assert job.ends() == 0


def test_a_script_that_fails_after_the_end_is_one(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    for member in job.members:
        member.done()
    assert job.ends() == 1
