"""Environment variables with invalid values: Slurm's, torch's and our own.

There is one row for each kind of value. tests/unit/util/test_variables.py tries every variable.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input.command import Need, Row, check, table

SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
TORCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def variable(base: dict[str, str], name: str, value: str, *others: Need) -> Row:
    """Return a row that changes one variable of a job's environment ``base``, and what its message names besides it."""
    return Row("launch {script}", [name, *others], environment={**base, name: value})


@table(
    variable(SLURM, "SLURM_PROCID", "x", "'x'", 0),
    variable(SLURM, "SLURM_NTASKS", "0", 0, 1),
    variable(SLURM, "SLURM_PROCID", "1", 1, "SLURM_NTASKS"),
    variable(SLURM, "OMP_NUM_THREADS", "-1", -1, 1),
    variable(SLURM, "MOEVEMENT_STORE", "host:0", "'host:0'", "HOST:PORT"),
    variable(SLURM, "MOEVEMENT_LOG", "xml", "'xml'", "json"),
    variable(SLURM, "MOEVEMENT_PLATFORM", "tpu", "'tpu'", "cuda"),
    variable(SLURM, "MOEVEMENT_FIRST_TASK", "1.5", "'1.5'", 0),
    variable(TORCH, "RANK", "1", 1, "WORLD_SIZE"),
    variable(TORCH, "LOCAL_RANK", "-1", -1, 0),
    variable(TORCH, "MASTER_PORT", "65536", 65536, 1, 65535),
    Row("launch {script}", ["--nproc", "srun"]),
    Row("launch {script}", ["MASTER_ADDR"], environment={**SLURM, "SLURM_NTASKS": "2"}),
    Row("coordinate --ranks 1", ["OMP_NUM_THREADS", "'many'", 1], environment={"OMP_NUM_THREADS": "many"}),
)
def test_launching(
    row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('it was started')\n")
    check(row, capfd, monkeypatch, script=tmp_path / "script.py")
