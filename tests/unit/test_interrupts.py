"""Ctrl-C ends a command in one line, also where what it interrupts takes it for something else, or drops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_core.exit_codes import INTERRUPTED
from moevement_core.interrupts import ends_in_one_line
from moevement_core.launching.signals import Signals, Stopped
from tests.training import ROOT

COMES = "os.kill(os.getpid(), signal.SIGINT)\n"
TRIES = f"import os, signal, time\ntry:\n    {COMES}    time.sleep(5)\nexcept BaseException as error:\n"
BODIES = {
    "computing": f"{COMES}time.sleep(60)",
    "importing": "import unlucky",
    "taken for something else": "tries('raise ImportError(1)')",
    "in a finalizer": "Finalized()\ntime.sleep(60)",
}
SCRIPT = f"""
import os, signal, sys, time
from moevement_core.interrupts import ends_in_one_line

class Finalized:
    def __del__(self):
        {COMES}

def tries(then):
    exec({TRIES!r} + "    " + then)

with ends_in_one_line(process_ends=True):
    {{body}}
{COMES}print("over")
"""


def run(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script around ``body``, with a module that swallows interruptions of its import."""
    (folder / "unlucky.py").write_text(f"{TRIES}    pass\ntime.sleep(60)\n")
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body.replace("\n", "\n    "))],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("where", BODIES)
def test_one_line_wherever_it_comes(where: str, tmp_path: Path) -> None:
    ended = run(BODIES[where], tmp_path)
    assert (ended.returncode, ended.stderr, ended.stdout) == (INTERRUPTED, "moevement: interrupted\n", "")


def test_other_errors_stay_and_the_end_is_not_interrupted(tmp_path: Path) -> None:
    failed = run("raise ZeroDivisionError('of its own')", tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1] == "ZeroDivisionError: of its own"
    for ends in ("pass", "tries('pass')"):  # the second one has caught it, as who ends in order does
        done = run(ends, tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_a_caller_has_its_handler_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended, ends_in_one_line(process_ends=False):
        os.kill(os.getpid(), signal.SIGINT)
    assert ended.value.code == INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    try:
        with ends_in_one_line(process_ends=True):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_launcher_ends_after_an_import_and_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signalled.py").write_text(f"import os, signal\n{COMES}whole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Signals() as signals:
        import signalled  # type: ignore[import-not-found]

        assert signalled.whole
        with pytest.raises(Stopped) as stopped:
            signals.check()
    assert stopped.value.number == signal.SIGINT
