"""A job with grouped experts recovers bit for bit, and a replay computes weight gradients of active experts only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moevement_core.run.run_record import RunRecord
from tests.functional.grouped import trained_on_grouped_layers
from tests.functional.wiped import ALWAYS_REORDER, BF16, DISTRIBUTED, ITERATIONS, check
from tests.harness import run_ranks
from tests.training import SCRIPT, flags

WIPED: dict[str, Any] = {"moevement_window": 4, "moevement_wipe_at": 9}


def run(folder: Path, **job: Any) -> tuple[RunRecord, set[tuple[int, int]]]:
    """Train one rank with all four experts of a layer in one module; return its record and the gradients computed."""
    words = flags(train_iters=ITERATIONS, **BF16, **DISTRIBUTED, moevement_frozen_kernels="wgrad", **job)
    argv = [str(SCRIPT), *words, "--run-dir", str(folder)]
    (outcome,) = run_ranks(trained_on_grouped_layers, 1, argv, init_process_group=False)
    return RunRecord(folder), outcome.result


def test_a_wiped_job_replays_a_grouped_layer_with_frozen_and_active_experts(tmp_path: Path) -> None:
    wanted, in_training = run(tmp_path / "wanted")
    sparse = {"moevement_sparse_ckpt": True, "moevement_replicas": 0, **WIPED, **ALWAYS_REORDER}
    recovered, computed = run(tmp_path / "recovered", **sparse)
    check(wanted, recovered, sparse)
    assert in_training == {(4, 4)}
    assert any(0 < active < experts for active, experts in computed), "a replay with both in one layer"
