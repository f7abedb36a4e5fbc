"""Processes that a launcher or a task (a supervisor under Slurm) starts on its host, each watched separately.

Torch's elastic multiprocessing is not used here, for three reasons:

- Its context ends all processes when one fails.
- It blocks until a process that has finished its function has exited.
- It waits forever on an event when a process is killed at the wrong moment.
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
from moevement_core.util.environment import PARENT_ENV
from moevement_core.util.exit_codes import BROKEN_DEVICE, DRAINED
from moevement_core.util.file_modes import make_folder, opener
from moevement_core.util.parent import end_with_parent

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a launcher, a task or a coordinator to end its job.

Ranks and spares ignore all of them. Otherwise such a signal could end a rank in the middle of an iteration, before the
job saves.
"""
WIND_DOWN_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals, out of :data:`END_SIGNALS`, that batch systems send before they take a machine away."""
END_S = 10.0
"""Longest time in seconds from SIGTERM to SIGKILL in :func:`end_all`, for a process that handles SIGTERM."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Program:
    """Code that a process runs: a function in a fork of this process, or a command."""

    function: Any = None
    arguments: tuple[Any, ...] = ()
    command: Sequence[str] = ()


class Child:
    """Process that this process starts, and that ends with this process.

    Args:
        label: name of the process and of its log files.
        program: the function or command that the process runs.
        environment: variables that the process gets in addition to this process's own.
        logs: folder for the output of the process; None: the process prints to the output of its parent.
    """

    def __init__(self, label: str, program: Program, environment: Mapping[str, str], logs: Path | None) -> None:
        self.label, self.logs = label, logs
        self.code: int | None = None
        """Exit code; None while the process runs. ``-N`` if signal N killed the process."""
        self.was_ended = False
        """True if :func:`end_all` ended the process, so that its exit code says nothing about the job."""
        environment = {**environment, PARENT_ENV: str(os.getpid())}
        with ExitStack() as opened:
            streams = [opened.enter_context(_log_file(logs / f"{label}.{s}")) for s in ("out", "err")] if logs else []
            if program.function is not None:
                forked = multiprocessing.get_context("fork").Process(
                    target=_run, args=(program, dict(environment), streams), name=label
                )
                sys.stdout.flush()
                with _signals_held():  # The launcher's signal handlers must not run in the new process.
                    forked.start()
                self._poll: Any = lambda: _code_of(forked)
                self.pid = int(forked.pid or 0)
            else:
                out, err = streams or (None, None)
                # The new process inherits blocked signals. It ignores these signals before it unblocks them.
                with _signals_held():
                    fresh = subprocess.Popen(program.command, env={**os.environ, **environment}, stdout=out, stderr=err)
                self._poll, self.pid = fresh.poll, fresh.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.code is None:
            self.code = self._poll()
        return self.code

    def is_stopped(self) -> bool:
        """Return True if the process is stopped (SIGSTOP): it lives but does nothing."""
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def send(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def how(self) -> str:
        """Description of the end of the process, for log lines ("was killed by signal 9")."""
        code = self.code or 0
        if code == BROKEN_DEVICE:
            return "gave its rank back because its device cannot be used"
        if code == DRAINED:
            return "gave its rank back as asked"
        return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"

    def lines_of(self, stream: str) -> list[str]:
        """Return the lines that the process has printed.

        Args:
            stream: ``out`` or ``err``.

        Returns:
            The lines so far; empty if the output is not kept in a file.
        """
        if self.logs is None:
            return []
        try:
            return (self.logs / f"{self.label}.{stream}").read_text(errors="replace").splitlines()
        except OSError:
            return []


def _code_of(forked: Any) -> int | None:
    """Return the exit code of a forked process, or None while it runs.

    When the process has ended, the function closes the file descriptors that belonged to it. Otherwise a launcher would
    run out of descriptors in a job with many failures.
    """
    if (code := forked.exitcode) is not None:
        forked.close()
    return None if code is None else int(code)


def _log_file(path: Path) -> TextIO:
    """Open an empty log file for the output of a process, in append mode.

    Append mode matters because :mod:`moevement_core.launching.logs` truncates the file while the process writes to it.
    If the file cannot be opened, for example on a full disk, the output is discarded and the job goes on.
    """
    try:
        make_folder(path.parent)
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.1").unlink(missing_ok=True)
        return open(path, "a", opener=opener)
    except OSError as error:
        log.warning(f"{path}: {error.strerror}; the output for this file is discarded")
        return open(os.devnull, "w")


@contextmanager
def _signals_held() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def ignore_asking() -> None:
    """Ignore the signals that ask a job to end; the launcher handles them for all its processes.

    Each rank and spare calls this before anything else. ``timeout``, systemd, ``scancel`` and the init programs of
    containers send these signals to every process of a job. If such a signal ended a rank, the job could not complete
    the iteration after which it saves and ends.
    """
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def end_workers() -> None:
    """Kill the daemonic children of this process, right before this process ends.

    Otherwise ``multiprocessing`` would send them SIGTERM at the exit of this process, and wait without a limit. Like
    this process, the children ignore SIGTERM.
    """
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _run(program: Program, environment: dict[str, str], streams: list[TextIO]) -> None:
    """Set up the forked process, and run the program in it."""
    ignore_asking()
    for stream, target in zip(streams, (1, 2), strict=False):
        os.dup2(stream.fileno(), target)
    os.environ.update(environment)
    end_with_parent()
    try:
        program.function(*program.arguments)  # On an exception, multiprocessing prints it and exits with code 1.
    finally:
        end_workers()


def end_all(children: Sequence[Child], timeout_s: float = END_S) -> None:
    """End the processes that still run, even stopped ones.

    A process that handles SIGTERM gets SIGTERM, and SIGKILL only if it still runs after a timeout. All others get
    SIGKILL.

    Args:
        children: the processes.
        timeout_s: longest wait in seconds after SIGTERM, and again after SIGKILL.
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
            process.resume()  # A stopped process would not receive the signal.
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.01)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Return True if a process has installed a handler for a signal (``SigCgt`` of proc(5))."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


@contextmanager
def no_orphans_left() -> Iterator[None]:
    """Kill, at the end of a ``with`` block, all processes that were started in the block, and their descendants.

    A killed rank leaves processes such as checkpoint writers and data workers. This process makes itself a subreaper
    (prctl(2)), so that it becomes the parent of such processes and can find them.
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
