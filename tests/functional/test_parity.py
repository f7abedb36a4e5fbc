"""Parity protects snapshots as copies do: jobs survive kills with the bits of a failure-free run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import LAYOUTS, SPARSE
from tests.launching import survive

NPROC, LAYOUT = LAYOUTS["PP2xEP2"]


@pytest.mark.parametrize(
    ("protection", "recovery"),
    [
        ("parity:3+1", {}),
        pytest.param("parity:3+1", {"moevement_recovery": "redo"}, marks=pytest.mark.full),
        pytest.param("parity:3+1", {"moevement_window_kind": "rolling"}, marks=pytest.mark.full),
        pytest.param("parity:2+2", {}, marks=pytest.mark.full),
    ],
)
def test_ranks_killed_one_after_the_other(tmp_path: Path, protection: str, recovery: dict[str, Any]) -> None:
    iterations = 20 if recovery else 15
    flags = SPARSE | LAYOUT | {"train_iters": iterations}
    wanted = failure_free_digest(NPROC, **flags)
    faults = (
        "rank=0,iteration=8,phase=backward", "rank=3,iteration=12,phase=step", "rank=1,iteration=17,phase=forward",
    )[: 3 if recovery else 2]  # fmt: skip
    survived = survive(
        NPROC, 3, tmp_path / "recovered", inject=faults, **flags | recovery, moevement_protection=protection
    )
    assert survived.digest == wanted
    survived.check_metrics(iterations)
    assert len(survived.failures()) == len(faults)
    assert all(failure["recovery"]["sources"]["parity"] for failure in survived.failures())
    assert all(not failure["recovery"]["sources"]["peer"] for failure in survived.failures())
