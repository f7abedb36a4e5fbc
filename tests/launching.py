"""``moevement launch`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from moevement_core.run_record import RunRecord
from tests.training import ROOT, SCRIPT, flags


def launch(*words: str, **kwargs: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "moevement_cli.main", "launch", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **kwargs)


def finished(process: subprocess.Popen[str], timeout_s: float = 280) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def survive(
    nproc: int,
    spares: int,
    run_dir: Path,
    *,
    options: tuple[str, ...] = (),
    inject: tuple[str, ...] = (),
    **flags_: Any,
) -> Survived:
    """A job with ``spares`` to which the faults of ``inject`` happen; it has to come to its end."""
    words = flags(**flags_)
    for fault in inject:
        words += ["--moevement-inject", fault]
    code, out, err = finished(
        launch("--nproc", str(nproc), "--spares", str(spares), *options, str(SCRIPT), *words, "--run-dir", str(run_dir))
    )
    assert code == 0, f"{out}\n{err}\n{logs(run_dir)}"
    return Survived(run_dir, out)


class Survived:
    """A job that came to its end."""

    def __init__(self, run_dir: Path, out: str) -> None:
        self.record, self.out = RunRecord(run_dir), out

    @property
    def digest(self) -> str:
        return str(self.record.summary()["state_digest"]["all"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.record.events() if event["event"] == kind]

    def failures(self) -> list[dict[str, Any]]:
        """One of each time that the job was formed again."""
        return self.events("failure")

    def ranks(self) -> list[dict[str, Any]]:
        return list(json.loads(self.record.ranks_path.read_text()))

    def check_metrics(self, iterations: int) -> None:
        """Each committed iteration has exactly one line."""
        assert [line["iteration"] for line in self.record.metrics()] == list(range(1, iterations + 1))


def logs(run_dir: Path) -> str:
    """The ends of all logs, for whoever reads why a test failed."""
    texts = []
    for path in sorted((run_dir / "logs").glob("*")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if "iteration  " not in line]
        texts.append(f"== {path.name}\n" + "\n".join(lines[-25:]))
    return "\n".join(texts)
