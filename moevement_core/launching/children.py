"""Processes of one host that the launcher starts, each watched by itself.

Not torch's elastic multiprocessing: its context ends all processes when one fails, blocks until a process that has
returned is gone, and waits for ever on its own event when a process is killed at the wrong moment.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from moevement_core import log
from moevement_core.exit_codes import BROKEN_DEVICE
from moevement_core.file_modes import make_folder, opener
from moevement_core.restart.environment import PARENT_ENV

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a process to end, at once or by and by; none of them may end it and leave its children."""
WINDING_DOWN = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Those of them that come before a machine is taken away."""
END_S = 10.0
"""Seconds that a process with a handler of its own for SIGTERM has to end before it is killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclass(frozen=True)
class Program:
    """What a process runs: a function, forked from this process; or a command."""

    function: Any = None
    arguments: tuple[Any, ...] = ()
    command: Sequence[str] = ()


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, however that ends.

    To be called first in it. A rank whose launcher is gone would train on, unseen, beside the job that is started next.
    """
    parent = os.environ.get(PARENT_ENV)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """One process, which ends with this one.

    Args:
        label: its name, and of its log files.
        program: what it runs.
        environment: beside the launcher's own.
        logs: the folder for its output; nothing for the launcher's.
    """

    def __init__(self, label: str, program: Program, environment: Mapping[str, str], logs: Path | None) -> None:
        self.label, self.logs = label, logs
        self.code: int | None = None
        """How it ended; negative: by which signal."""
        self.was_ended = False
        """Whether :func:`end_all` ended it, so that its code says nothing about the job."""
        environment = {**environment, PARENT_ENV: str(os.getpid())}
        with ExitStack() as opened:
            streams = [opened.enter_context(_log_file(logs / f"{label}.{s}")) for s in ("out", "err")] if logs else []
            if program.function is not None:
                forked = multiprocessing.get_context("fork").Process(
                    target=_run, args=(program, dict(environment), streams), name=label
                )
                sys.stdout.flush()
                with _signals_held():  # the launcher's handlers are not for the new process
                    forked.start()
                self._poll: Any = lambda: _code_of(forked)
                self.pid = int(forked.pid or 0)
            else:
                out, err = streams or (None, None)
                # Held signals stay so in the new process, which ignores them before it takes them up.
                with _signals_held():
                    fresh = subprocess.Popen(program.command, env={**os.environ, **environment}, stdout=out, stderr=err)
                self._poll, self.pid = fresh.poll, fresh.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.code is None:
            self.code = self._poll()
        return self.code

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP), so that it does nothing though it lives."""
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def how(self) -> str:
        """How it ended, in words."""
        code = self.code or 0
        if code == BROKEN_DEVICE:
            return "gave its rank back because its device cannot be used"
        return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"

    def lines_of(self, stream: str) -> list[str]:
        """What it has printed to ``out`` or ``err``; nothing where that is not kept."""
        if self.logs is None:
            return []
        try:
            return (self.logs / f"{self.label}.{stream}").read_text(errors="replace").splitlines()
        except OSError:
            return []


def _code_of(forked: Any) -> int | None:
    """Its exit code, once it has ended; then its descriptors are given back: a job of many failures would run out."""
    if (code := forked.exitcode) is not None:
        forked.close()
    return None if code is None else int(code)


def _log_file(path: Path) -> TextIO:
    """What a process prints goes there; nothing where its folder is gone or full, for which no job ends.

    It is appended to: whoever rotates it makes it empty under its writer.
    """
    try:
        make_folder(path.parent)
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.1").unlink(missing_ok=True)
        return open(path, "a", opener=opener)
    except OSError as error:
        log.warning(f"{path}: {error.strerror}; what this process prints is not kept")
        return open(os.devnull, "w")


@contextmanager
def _signals_held() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def ignore_asking() -> None:
    """Ignore the signals that ask a job to end; the launcher answers them for its processes.

    ``timeout``, systemd, ``scancel`` and init programs of containers send them to every process of a job. A rank that
    died of one could not come to the boundary at which the job saves and ends. Called first in each process.
    """
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def end_workers() -> None:
    """Kill the daemonic children of this process, which ignore SIGTERM as it does; called before it ends.

    ``multiprocessing`` ends them by SIGTERM and then waits for them without a limit.
    """
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _run(program: Program, environment: dict[str, str], streams: list[TextIO]) -> None:
    """In the forked process."""
    ignore_asking()
    for stream, target in zip(streams, (1, 2), strict=False):
        os.dup2(stream.fileno(), target)
    os.environ.update(environment)
    end_with_parent()
    try:
        program.function(*program.arguments)  # what it raises multiprocessing prints, and the process ends with 1
    finally:
        end_workers()


def end_all(children: Sequence[Child], timeout_s: float = END_S) -> None:
    """End the processes that still run: SIGTERM for those that handle it themselves, then SIGKILL for all.

    Args:
        children: the processes.
        timeout_s: seconds that a process with a handler for SIGTERM has; all others are killed at once.
    """
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.was_ended = True
    polite = [child for child in running if _handles(child.pid, signal.SIGTERM)]
    _send_and_wait(polite, psutil.Process.terminate, timeout_s)
    _send_and_wait([child for child in running if child.poll() is None], psutil.Process.kill, timeout_s)


def _send_and_wait(children: Sequence[Child], send: Callable[[psutil.Process], None], timeout_s: float) -> None:
    for child in children:
        with suppress(psutil.NoSuchProcess):
            send(process := psutil.Process(child.pid))
            process.resume()  # one that is stopped would not hear of it
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.01)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of its own for a signal (``SigCgt`` of proc(5))."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """End every process that descends from those started in a ``with`` block, however it was orphaned.

    A rank that is killed leaves its checkpoint writers and data workers to the nearest subreaper: this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    launcher = psutil.Process()
    before = set(launcher.children(recursive=True))
    try:
        yield
    finally:
        left = [process for process in launcher.children(recursive=True) if process not in before]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
