"""Environment variables that say what cannot be: Slurm's, torch's and our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input.command import Row, check, table

SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
TORCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def rows(given: dict[str, str], name: str, *values: str) -> list[Row]:
    """One for each value."""
    return [Row("launch {script}", [name], environment={**given, name: value}) for value in values]


@table(
    *rows(SLURM, "SLURM_PROCID", "x", "-1", "1.5", "1"),
    *rows(SLURM, "SLURM_NTASKS", "x", "-1", "0", "all"),
    *rows(SLURM, "SLURM_LOCALID", "x", "-1"),
    *rows(SLURM, "SLURM_CPUS_PER_TASK", "x", "0", "-4"),
    *rows(SLURM, "OMP_NUM_THREADS", "x", "0", "-1"),
    *rows(SLURM, "MOEVEMENT_STORE", "x", "host", "host:", ":1", "host:0", "host:99999", "host:port"),
    *rows(SLURM, "MOEVEMENT_LOG", "xml"),
    *rows(SLURM, "MOEVEMENT_PLATFORM", "tpu"),
    *rows(SLURM, "MOEVEMENT_FIRST_TASK", "x", "-1"),
    *rows(TORCH, "RANK", "x", "-1", "1", "9999999999999999999999"),
    *rows(TORCH, "WORLD_SIZE", "x", "-1", "0"),
    *rows(TORCH, "LOCAL_RANK", "x", "-1"),
    *rows(TORCH, "MASTER_PORT", "x", "-1", "0", "65536", "tcp://127.0.0.1:1"),
    Row("launch {script}", ["no --nproc and not started by srun"]),
    Row("launch {script}", ["MASTER_ADDR is not set"], environment={**SLURM, "SLURM_NTASKS": "2"}),
    Row("coordinate --ranks 1", ["OMP_NUM_THREADS"], environment={"OMP_NUM_THREADS": "many"}),
)
def test_launching(
    row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('it was started')\n")
    check(row, capfd, monkeypatch, script=tmp_path / "script.py")
