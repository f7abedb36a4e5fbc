"""Check that a job is refused if the limit on processes and threads is so low that the job would hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bad_input.command import unnamed
from tests.training import ROOT, SCRIPT

PIDS = Path("/sys/fs/cgroup/pids")


@pytest.fixture
def group() -> Iterator[Path]:
    """Yield a new control group that allows 60 processes and threads."""
    folder = (PIDS if PIDS.is_dir() else PIDS.parent) / f"moevement-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "pids.max").write_text("60")
    except OSError as error:
        pytest.skip(f"needs a control group of its own: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("ranks", ["1", pytest.param("4", marks=pytest.mark.full)])
def test_a_control_group_that_is_too_small_is_named(ranks: str, group: Path) -> None:
    words = [sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", ranks, str(SCRIPT)]
    ended = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
    )  # fmt: skip
    assert ended.returncode == 2
    (message,) = ended.stderr.splitlines()
    assert not unnamed(message, ["moevement", "pids.max", str(group), 60, int(ranks)]), message
