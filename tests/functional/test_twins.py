"""Lost ranks take their state from a live data-parallel replica that has all of it; no iteration is re-executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.verify import compare
from tests.failure_free import failure_free, failure_free_digest
from tests.functional.jobs import SPARSE
from tests.launching import survive

LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "PP2xDP2": (
        4, {"pipeline_model_parallel_size": 2, "hidden_dropout": 0.1, "bf16": True},
        ("rank=1,iteration=8,phase=backward", "rank=2,iteration=13,phase=step", "rank=3,iteration=17,phase=forward"),
    ),
    "DP2": (
        2, {"moevement_replicas": 1},
        ("rank=1,iteration=6,phase=forward", "rank=0,iteration=10,phase=reduce", "rank=1,iteration=14,phase=step"),
    ),
    "EP2xEDP2": (
        4, {"expert_model_parallel_size": 2, "fp16": True, "initial_loss_scale": 2**16, "global_batch_size": 8},
        ("rank=0,iteration=7,phase=backward", "rank=3,iteration=15,phase=step"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout", ["DP2", *(pytest.param(name, marks=pytest.mark.full) for name in ("PP2xDP2", "EP2xEDP2"))]
)
def test_a_lost_rank_takes_its_state_from_a_live_replica(tmp_path: Path, layout: str) -> None:
    nproc, words, faults = LAYOUTS[layout]
    wanted = failure_free(nproc, **SPARSE | words)
    survived = survive(nproc, len(faults), tmp_path / "recovered", inject=faults, **SPARSE | words)
    assert survived.digest == failure_free_digest(nproc, **SPARSE | words)
    survived.check_metrics(20)
    # The metrics too: another rank knows the loss of an iteration in whose update a rank was lost.
    assert compare(wanted, survived.record).first_difference is None
    recoveries = [failure["recovery"] for failure in survived.failures()]
    assert len(recoveries) == len(faults)
    for recovery in recoveries:
        assert (recovery["replayed"], recovery["redone"]) == (0, 0)
        assert recovery["sources"]["replica"] == len(recovery["ranks"]) == 1
        assert recovery["restored"] > 0, "it is compared with digests that the replica made"


@pytest.mark.full
def test_what_is_due_between_two_iterations_is_not_undone_on_the_rank_that_was_lost(tmp_path: Path) -> None:
    """Kill ranks after an evaluation: each replacement counts the samples that the evaluation consumed."""
    nproc, words, _ = LAYOUTS["DP2"]
    words = words | {"eval_interval": 5, "eval_iters": 2}
    wanted = failure_free_digest(nproc, **SPARSE | words)
    faults = ("rank=1,iteration=6,phase=backward", "rank=0,iteration=11,phase=forward")
    survived = survive(nproc, 2, tmp_path / "recovered", inject=faults, **SPARSE | words)
    assert survived.digest == wanted
    assert all(failure["recovery"]["sources"]["replica"] == 1 for failure in survived.failures())


@pytest.mark.full
def test_a_rank_whose_replicas_are_gone_too_is_recovered_from_snapshots(tmp_path: Path) -> None:
    nproc, words, _ = LAYOUTS["PP2xDP2"]
    wanted = failure_free_digest(nproc, **SPARSE | words)
    faults = ("rank=0,iteration=9,phase=backward", "rank=1,iteration=9,phase=backward")
    survived = survive(nproc, 2, tmp_path / "recovered", inject=faults, **SPARSE | words)
    assert survived.digest == wanted
    assert sum(failure["recovery"]["replayed"] for failure in survived.failures()) > 0
