"""Ctrl-C: one line, and no traceback, whatever a command does then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from moevement_core.rendezvous.token import TOKEN_ENV, Token
from tests.training import ROOT

COMMANDS = {
    "plan": "plan deepseek_moe --ranks 512 --iteration-time 2 --cluster moevement-h100",
    "simulate": "simulate laptop --mtbf 1 --hours 12 --seeds 20",
    "workers": "simulate laptop --mtbf 1 --hours 12 --seeds 20 --workers 2",
    "coordinate": "coordinate --ranks 2",
    "launch": "launch --nproc 1 examples/plain_torch/train.py",
    "data": "data build {python} --output {folder}/out --documents line",
}
STARTED = "import sys; print('started', flush=True); from moevement_cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("after_s", [0.0, 3.0])
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_one_line(name: str, after_s: float, tmp_path: os.PathLike[str]) -> None:
    words = COMMANDS[name].format(python=os.path.dirname(os.__file__), folder=tmp_path).split()
    started = subprocess.Popen(
        [sys.executable, "-c", STARTED, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, TOKEN_ENV: Token.new().text},
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline() == "started\n"
    time.sleep(0.3 + after_s)  # past the import of the command line itself
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, err = started.communicate(timeout=60)
    if started.returncode == 0:
        return  # it was over by then
    assert started.returncode == 130, err
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1] in (
        "moevement: interrupted",
        "moevement: stopped by SIGINT",
        "moevement: stopped by Ctrl-C",
    )
    assert len(err.strip().splitlines()) == 1, err
