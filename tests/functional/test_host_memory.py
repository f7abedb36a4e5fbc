"""Jobs respect a limit on host memory, drop their own snapshots first, and recover with the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import LAYOUTS, SPARSE
from tests.launching import finished, launch, logs, survive
from tests.training import SCRIPT, flags

NPROC, LAYOUT = LAYOUTS["PP2xEP2"]
WIDE = SPARSE | LAYOUT | {"hidden_size": 256}
"""Flags of a model so wide that a thousandth of a gigabyte is a small part of the memory that it needs."""
FAULTS = ("rank=0,iteration=8,phase=backward", "rank=3,iteration=14,phase=forward")


@pytest.mark.parametrize("recovery", [{}, {"moevement_recovery": "redo"}], ids=["replay", "redo"])
@pytest.mark.full
def test_ranks_whose_own_snapshots_are_dropped_get_them_from_peers(tmp_path: Path, recovery: dict[str, Any]) -> None:
    wanted = failure_free_digest(NPROC, **SPARSE | LAYOUT)
    survived = survive(
        NPROC, 2, tmp_path / "recovered", inject=FAULTS, **SPARSE | LAYOUT | recovery, moevement_keep_own="never"
    )
    assert survived.digest == wanted
    survived.check_metrics(20)
    assert len(survived.failures()) == 2
    recoveries = [failure["recovery"] for failure in survived.failures()]
    assert all(entry["sources"]["memory"] < entry["sources"]["peer"] for entry in recoveries), recoveries
    assert not any(line["windows_abandoned"] for line in survived.record.metrics())
    assert survived.record.summary()["checkpointing"]["windows_abandoned"] == 0


def test_what_does_not_fit_is_refused_with_what_makes_it_fit(tmp_path: Path) -> None:
    check_refusals(tmp_path)


@pytest.mark.full
@pytest.mark.slow("three jobs")
def test_what_was_named_makes_a_job_fit(tmp_path: Path) -> None:
    wanted = failure_free_digest(NPROC, **WIDE)
    tight = check_refusals(tmp_path)
    survived = survive(NPROC, 2, tmp_path / "recovered", inject=FAULTS, **WIDE, moevement_host_memory_gb=f"{tight:.6f}")
    recoveries = [failure["recovery"] for failure in survived.failures()]
    assert all(entry["sources"]["memory"] < entry["sources"]["peer"] for entry in recoveries), (
        "own snapshots are dropped"
    )
    assert survived.digest == wanted


def check_refusals(tmp_path: Path) -> float:
    """Check which flags refused jobs propose; return the gigabytes that are enough if own snapshots are dropped."""
    needed, change = refused(tmp_path / "a", moevement_host_memory_gb="0.000001", moevement_keep_own="always")
    assert change.startswith("--moevement-host-memory-gb ")
    few = 0.7 * needed  # own snapshots need a third of it, half of them in flight
    _, change = refused(tmp_path / "b", moevement_host_memory_gb=f"{few:.6f}", moevement_keep_own="always")
    assert change == "--moevement-replicas 1"
    tight = 0.9 * needed
    _, change = refused(tmp_path / "c", moevement_host_memory_gb=f"{tight:.6f}", moevement_keep_own="always")
    assert change == "--moevement-keep-own auto"
    return tight


def refused(folder: Path, **overrides: Any) -> tuple[float, str]:
    """Return the gigabytes that a refused job needs, and the change of flags that it proposes."""
    folder.mkdir()
    code, _, err = finished(
        launch("--nproc", str(NPROC), str(SCRIPT), *flags(**WIDE | overrides), "--run-dir",
               str(folder / "run"))
    )  # fmt: skip
    assert code == 2, logs(folder / "run")
    needed = re.search(r"\brank \d\b.*?([\d.]+) GB\b", err)
    assert needed is not None, err
    assert "Traceback" not in err
    return float(needed[1]), re.findall(r"--moevement-[\w-]+ [\w.]+", err)[-1]
