"""Jobs of the trainer in plain torch."""

from __future__ import annotations

from pathlib import Path

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.launching import finished, launch
from tests.training import ROOT

SCRIPT = ROOT / "examples" / "plain_torch" / "train.py"


def run(run_dir: Path, nproc: int, *words: str) -> RunRecord:
    options = ["--trainer", "torch", "--nproc", str(nproc), "--spares", "1"]
    arguments = ["--moevement-window", "4", "--moevement-verify", "iteration", "--iterations", "26", *words]
    code, out, err = finished(launch(*options, str(SCRIPT), *arguments, "--run-dir", str(run_dir)))
    assert (code, err) == (0, ""), out
    assert "iteration 26, loss " in out
    return RunRecord(run_dir)


def is_the_same(a: RunRecord, b: RunRecord) -> bool:
    return main(["verify", str(a.folder), str(b.folder)]) == 0
