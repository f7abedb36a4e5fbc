"""A small job with deaths in it, alone and with a stranger beside it; they have to come to the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from moevement_core.run_record import RunRecord
from tests.fuzz.stranger import Stranger
from tests.training import ROOT

SCRIPT = ROOT / "examples" / "plain_torch" / "train.py"
ITERATIONS = 30
FAULTS = ("rank=1,iteration=9,phase=step", "rank=0,iteration=18,phase=replicate")
TIMEOUT_S = 240


@dataclass(frozen=True)
class Attacked:
    """What came of it."""

    code: int
    output: str
    stranger: Stranger
    record: RunRecord


def attack(run_dir: Path, seed: int) -> Attacked:
    """Run the job with a stranger beside it."""
    with (
        (run_dir.parent / f"{run_dir.name}.out").open("w+") as out,
        subprocess.Popen(_command(run_dir), stdout=out, stderr=subprocess.STDOUT, cwd=ROOT) as process,
    ):
        try:
            with Stranger(process.pid, seed) as stranger:
                code = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
        out.seek(0)
        return Attacked(code, out.read(), stranger, RunRecord(run_dir))


def undisturbed(run_dir: Path) -> RunRecord:
    """Run the same job alone, without deaths."""
    done = subprocess.run(
        _command(run_dir, faults=()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return RunRecord(run_dir)


def _command(run_dir: Path, faults: tuple[str, ...] = FAULTS) -> list[str]:
    injected = [word for fault in faults for word in ("--moevement-inject", fault)]
    return [
        sys.executable, "-W", "ignore", "-m", "moevement_cli.main", "launch", "--trainer", "torch", "--nproc", "2",
        "--spares", "1", str(SCRIPT), "--moevement-window", "4", "--iterations", str(ITERATIONS), *injected,
        "--run-dir", str(run_dir),
    ]  # fmt: skip
