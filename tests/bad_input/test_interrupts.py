"""Ctrl-C ends a command with one line and no traceback, whatever the command does at that moment."""

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

from moevement_core.comms.token import TOKEN_ENV, Token
from tests.training import ROOT

pytestmark = pytest.mark.builds  # each test starts a fresh interpreter

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
FROM_RANKS = ("launch", "profile")
"""Commands whose ranks may print warnings of their own."""
EARLY_S, MIDDLE_S, LATE_S = 0.0, 0.9, 3.0
MOMENTS = [
    pytest.param(name, after_s, marks=() if after_s == MIDDLE_S or name in ("simulate", "launch") else pytest.mark.full)
    for name in COMMANDS
    for after_s in (EARLY_S, MIDDLE_S, LATE_S)
]
"""Pairs of command and delay until Ctrl-C; every test run has all commands at one delay, and two at all delays."""


@contextmanager
def started(words: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process group of its own, which is killed at the end of the ``with`` block."""
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
    """Send Ctrl-C to all processes, as a terminal does; return the exit code and the text on stderr."""
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize(("name", "after_s"), MOMENTS)
def test_ctrl_c_is_one_line(name: str, after_s: float, tmp_path: Path) -> None:
    words = COMMANDS[name].format(python=os.path.dirname(os.__file__), folder=tmp_path)
    with started(words) as process:
        time.sleep(after_s + 0.05)  # until the handler is installed
        if process.poll() is not None:  # a short command may have ended
            assert process.returncode == 0
            return
        code, err = interrupt(process)
    assert code == 130, err
    lines = err.strip().splitlines()
    assert lines[-1].startswith("moevement: "), err
    assert "Traceback" not in err
    assert len(lines) == 1 or name in FROM_RANKS, err
    assert not list(tmp_path.iterdir())


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the two processes that compute for a command, as soon as both have started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        workers = [child for child in psutil.Process(process.pid).children() if _computes(child)]
        if len(workers) == 2:
            return workers
        time.sleep(0.01)
    raise AssertionError("no workers")


def _computes(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # an import runs short programs, which end meanwhile
        return False


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_workers_end_with_who_waits_for_them(after_s: float) -> None:
    with started(WORKERS) as process:
        workers = workers_of(process)
        time.sleep(after_s)
        code, err = interrupt(process)
        assert code == 130
        assert err.startswith("moevement: ")
        assert len(err.splitlines()) == 1
        assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_workers_go_on_where_it_is_ignored() -> None:
    with started(WORKERS, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:  # as under nohup
        workers_of(process)
        time.sleep(1.0)
        assert interrupt(process) == (0, "")
