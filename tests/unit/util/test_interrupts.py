"""Ctrl-C ends a command even if the interrupted code swallows or misreads it; other errors stay as they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_core.launching.signals import Signals, Stopped
from moevement_core.util.exit_codes import INTERRUPTED
from moevement_core.util.interrupts import held_back, interruptible
from tests.training import ROOT

COMES = "os.kill(os.getpid(), signal.SIGINT)\n"
IN_AN_IMPORT = f"""
import os, signal, time
try:
    {COMES}
    time.sleep(0.5)
except BaseException:
    pass
else:
    print("whole", flush=True)
"""
SCRIPT = f"""
import os, signal, sys, time
from moevement_core.util.interrupts import interruptible

class Finalized:
    def __del__(self):
        {COMES}

def tries(then):
    try:
        {COMES}
        time.sleep(5)
    except BaseException:
        then()

def fails():
    raise ImportError(1)

try:
    with interruptible(process_ends=True):
        {{body}}
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit({INTERRUPTED})
{COMES}print("over")
"""


def run(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script around ``body``, with a module during whose import the signal arrives."""
    (folder / "unlucky.py").write_text(IN_AN_IMPORT)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body.replace("\n", "\n        "))],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "before"),
    [
        (f"{COMES}time.sleep(60)", ""),
        ("import unlucky\ntime.sleep(60)", "whole\n"),
        ("tries(fails)", ""),
        ("Finalized()\ntime.sleep(60)", ""),
    ],
    ids=["computing", "importing", "taken for something else", "in a finalizer"],
)
def test_it_ends_wherever_it_comes(body: str, before: str, tmp_path: Path) -> None:
    ended = run(body, tmp_path)
    assert (ended.returncode, ended.stderr, ended.stdout) == (INTERRUPTED, "interrupted\n", before)


@pytest.mark.parametrize("body", ["raise ZeroDivisionError(1)", "tries(int)\nraise ZeroDivisionError(1)"])
def test_what_has_another_cause_stays(body: str, tmp_path: Path) -> None:
    failed = run(body, tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1] == "ZeroDivisionError: 1"


@pytest.mark.parametrize(("body", "code", "out"), [("pass", 0, "over\n"), ("tries(int)", 0, "over\n"), (
    "tries(lambda: sys.exit(3))", 3, "")])  # fmt: skip
def test_who_catches_it_ends_as_it_wants_to_and_the_end_is_not_interrupted(
    body: str, code: int, out: str, tmp_path: Path
) -> None:
    done = run(body, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, "")


def test_a_caller_has_its_handlers_back() -> None:
    before, unraisable = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)], sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interruptible(process_ends=False):
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)] == before
    assert sys.unraisablehook is unraisable


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    try:
        with interruptible(process_ends=True):
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
        os.kill(os.getpid(), signal.SIGINT)  # the cleanup is not interrupted again
    assert stopped.value.number == signal.SIGINT


def test_an_interrupt_comes_after_what_holds_it_back() -> None:
    done: list[bool] = []

    def goes_on() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        goes_on()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored_where_it_would_be_held_back() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
