"""Helpers that start ``moevement launch`` as a user does, or in a fork of a process that has its imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.harness import context
from tests.training import ROOT, SCRIPT, flags


def command(*words: str, **kwargs: Any) -> subprocess.Popen[str]:
    """Start the command as a user does. Its imports take seconds, so only tests of the command itself use this."""
    argv = [sys.executable, "-W", "ignore", "-m", "moevement_cli.main", "launch", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **kwargs)


class Launcher:
    """Command in a forked process, with the part of the interface of ``subprocess.Popen`` that tests use.

    Args:
        words: arguments of the command.
        leads_group: True if the process leads a process group.
        console: file for all output; None if ``communicate`` returns the output.
        environment: all environment variables of the process; None for those of this process.
    """

    def __init__(
        self,
        *words: str,
        leads_group: bool = False,
        console: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [console or Path(self._folder.name) / name for name in ("out", "err")]
        for path in self._outputs:
            path.touch()
        variables = dict(os.environ if environment is None else environment)
        self._process = context.Process(
            target=_run, args=(["launch", *words], variables, [str(path) for path in self._outputs], leads_group)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("moevement launch", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text(errors="replace") for path in self._outputs)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(argv: list[str], environment: dict[str, str], outputs: list[str], leads_group: bool) -> None:
    if leads_group:
        os.setsid()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    tempfile.tempdir = None
    sys.warnoptions[:] = ["ignore"]
    warnings.simplefilter("ignore")
    try:
        code: Any = main(argv)
    except SystemExit as exit_:
        code = exit_.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def launch(*words: str, leads_group: bool = False) -> Launcher:
    """Start the command in a forked process.

    Args:
        words: arguments of the command.
        leads_group: True if the process leads a process group, as a job of a shell or a service does.
    """
    return Launcher(*words, leads_group=leads_group)


def forks_launchers(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a module fork the launchers that it starts, because a fresh interpreter needs seconds for imports.

    Args:
        module: module that uses ``subprocess`` for launchers only.
        monkeypatch: fixture of the test. When the test ends, the module starts fresh interpreters again.
    """
    forking = SimpleNamespace(Popen=_forked, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(module, "subprocess", forking)


def _forked(argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str] | None = None) -> Any:
    *interpreter, subcommand = argv[:4]
    assert (interpreter, subcommand) == ([sys.executable, "-m", "moevement_cli.main"], "launch")
    assert stdout is stderr
    return Launcher(*argv[4:], console=Path(str(stdout.name)), environment=env)


def finished(process: subprocess.Popen[str] | Launcher, timeout_s: float = 280) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode is not None
    return process.returncode, out, err


def survive(
    nproc: int,
    spares: int,
    run_dir: Path,
    *,
    options: tuple[str, ...] = (),
    inject: tuple[str, ...] = (),
    script: Path = SCRIPT,
    **flags_: Any,
) -> Survived:
    """Run a job with ``spares``, inject the faults of ``inject``, and check that the job ends with exit code 0."""
    words = flags(**flags_)
    for fault in inject:
        words += ["--moevement-inject", fault]
    code, out, err = finished(
        launch("--nproc", str(nproc), "--spares", str(spares), *options, str(script), *words, "--run-dir", str(run_dir))
    )
    assert code == 0, f"{out}\n{err}\n{logs(run_dir)}"
    return Survived(run_dir, out)


class Survived:
    """Job that ended with exit code 0 after its failures."""

    def __init__(self, run_dir: Path, out: str) -> None:
        self.record, self.out = RunRecord(run_dir), out

    @property
    def digest(self) -> str:
        return str(self.record.summary()["state_digest"]["all"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.record.events() if event["event"] == kind]

    def failures(self) -> list[dict[str, Any]]:
        """Return the failure events: one for each time that the ranks regrouped."""
        return self.events("failure")

    def ranks(self) -> list[dict[str, Any]]:
        return list(json.loads(self.record.ranks_path.read_text()))

    def check_metrics(self, iterations: int) -> None:
        """Check that the metrics have exactly one line for each committed iteration."""
        assert [line["iteration"] for line in self.record.metrics()] == list(range(1, iterations + 1))


def logs(run_dir: Path) -> str:
    """Return the last lines of all logs of a run, for the message of a failed test."""
    texts = []
    for path in sorted((run_dir / "logs").glob("*")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if "iteration  " not in line]
        texts.append(f"== {path.name}\n" + "\n".join(lines[-25:]))
    return "\n".join(texts)
