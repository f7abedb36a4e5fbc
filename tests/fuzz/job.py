"""Small job that runs twice, undisturbed, and with kills and an attacker; both runs must end in the same state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moevement_core.run.run_record import RunRecord
from tests.fuzz.stranger import Stranger
from tests.training import ROOT

SCRIPT = ROOT / "examples" / "plain_torch" / "train.py"
ITERATIONS = 60
KILLS = ((9, 1), (30, 0))
"""Pairs of an iteration and the rank that is killed after it."""
TIMEOUT_S = 240


@dataclass(frozen=True)
class Attacked:
    """Result of a job that was attacked."""

    code: int
    output: str
    stranger: Stranger
    record: RunRecord


def attack(run_dir: Path, seed: int) -> Attacked:
    """Run the job with kills and an attacker; return its result."""
    with (
        (run_dir.parent / f"{run_dir.name}.out").open("w+") as out,
        subprocess.Popen(_command(run_dir), stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, text=True) as process,
    ):
        try:
            with Stranger(process.pid, seed) as stranger:
                _kill_ranks(process, RunRecord(run_dir))
                code = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
        out.seek(0)
        return Attacked(code, out.read(), stranger, RunRecord(run_dir))


def undisturbed(run_dir: Path) -> RunRecord:
    """Run the same job without kills and without an attacker; return its record."""
    done = subprocess.run(
        _command(run_dir), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return RunRecord(run_dir)


def _kill_ranks(process: subprocess.Popen[str], record: RunRecord) -> None:
    for iteration, rank in KILLS:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            newest = record.newest_metric()
            if newest is not None and newest["iteration"] >= iteration:
                ranks = json.loads(record.ranks_path.read_text())
                os.kill(next(entry["pid"] for entry in ranks if entry["rank"] == rank), signal.SIGKILL)
                break
            time.sleep(0.01)


def _command(run_dir: Path) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "moevement_cli.main", "launch", *job_words(run_dir)]


def job_words(run_dir: Path) -> list[str]:
    """Return the arguments of ``moevement launch``."""
    return [
        "--trainer", "torch", "--nproc", "2", "--spares", "1", str(SCRIPT), "--moevement-window", "4",
        "--iterations", str(ITERATIONS), "--run-dir", str(run_dir),
    ]  # fmt: skip
