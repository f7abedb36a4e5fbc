"""Ctrl-C: one line, and no traceback, whatever a command does then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moevement_core.rendezvous.token import TOKEN_ENV, Token
from tests.training import ROOT

COMMANDS = {
    "plan": "plan deepseek_moe --ranks 96 --iteration-time 2 --cluster moevement-h100",
    "simulate": "simulate laptop --mtbf 1 --hours 12 --seeds 20",
    "workers": "simulate laptop --mtbf 1 --hours 12 --seeds 20 --workers 2",
    "coordinate": "coordinate --ranks 2",
    "launch": "launch --nproc 1 examples/plain_torch/train.py",
    "data": "data build {python} --output {folder}/out --documents line",
}
STARTED = "import sys; print('started', flush=True); from moevement_cli.main import main; sys.exit(main())"
ENDS = ("moevement: interrupted", "moevement: stopped by SIGINT", "moevement: stopped by Ctrl-C")
FROM_RANKS = ("launch",)
"""Commands in whose output there may be warnings of ranks."""


@pytest.mark.parametrize("after_s", [0.3, 1.1, 3.3])
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_one_line(name: str, after_s: float, tmp_path: Path) -> None:
    words = COMMANDS[name].format(python=os.path.dirname(os.__file__), folder=tmp_path).split()
    started = subprocess.Popen(
        [sys.executable, "-c", STARTED, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, TOKEN_ENV: Token.new().text},
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline() == "started\n"
    time.sleep(after_s)  # past the import of the command line itself
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, err = started.communicate(timeout=60)
    if started.returncode == 0:
        return  # it was over by then
    assert started.returncode == 130, err
    lines = err.strip().splitlines()
    assert lines[-1] in ENDS, err
    assert "Traceback" not in err
    assert len(lines) == 1 or name in FROM_RANKS, err
    assert not list(tmp_path.iterdir())
