"""Ctrl-C: one line, and no traceback, whatever a command does then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from moevement_core.rendezvous.token import TOKEN_ENV, Token
from tests.training import ROOT

pytestmark = pytest.mark.builds  # each from a fresh interpreter

COMMANDS = {
    "plan": "plan deepseek_moe --ranks 96 --iteration-time 2 --cluster moevement-h100",
    "simulate": "simulate laptop --mtbf 1 --hours 12 --seeds 20",
    "coordinate": "coordinate --ranks 2",
    "launch": "launch --nproc 1 examples/plain_torch/train.py",
    "profile": "profile --nproc 4 --output {folder}/profile.yaml examples/pretrain_moe/pretrain_gpt.py "
    "--config examples/pretrain_moe/configs/laptop.yaml",
    "data": "data build {python} --output {folder}/out --documents line",
}
WORKERS = "simulate laptop --mtbf 20 --hours 12 --seeds 20 --workers 2"
STARTED = "import sys; from moevement_cli.main import main; print('started', flush=True); sys.exit(main())"
ENDS = ("moevement: interrupted", "moevement: stopped by SIGINT", "moevement: stopped by Ctrl-C")
FROM_RANKS = ("launch", "profile")
"""Commands in whose output there may be warnings of ranks."""


@contextmanager
def started(words: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """A command that has begun, in a process group of its own, which is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, *words.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, TOKEN_ENV: Token.new().text}, **kwargs,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Send Ctrl-C as a terminal does, to all processes; returns the exit code and what was printed as errors."""
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("after_s", [0.0, 0.9, 3.0])
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_one_line(name: str, after_s: float, tmp_path: Path) -> None:
    words = COMMANDS[name].format(python=os.path.dirname(os.__file__), folder=tmp_path)
    with started(words) as process:
        time.sleep(after_s + 0.05)  # the handler is there
        if process.poll() is not None:  # it was over by then
            assert process.returncode == 0
            return
        code, err = interrupt(process)
    assert code == 130, err
    lines = err.strip().splitlines()
    assert lines[-1] in ENDS, err
    assert "Traceback" not in err
    assert len(lines) == 1 or name in FROM_RANKS, err
    assert not list(tmp_path.iterdir())


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Those that compute for it, as soon as they are started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [one for one in psutil.Process(process.pid).children() if _computes(one)]
        if len(found) == 2:
            return found
        time.sleep(0.01)
    raise AssertionError("no workers")


def _computes(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # something that an import runs
        return False


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_workers_end_with_who_waits_for_them(after_s: float) -> None:
    with started(WORKERS) as process:
        workers = workers_of(process)
        time.sleep(after_s)
        code, err = interrupt(process)
        assert (code, err) == (130, "moevement: interrupted\n")
        assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_workers_go_on_where_it_is_ignored() -> None:
    with started(WORKERS, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:  # as under nohup
        workers_of(process)
        time.sleep(1.0)
        assert interrupt(process) == (0, "")
