"""Host memory of snapshots follows the window in force, and recoveries stay exact after memory is freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import SPARSE
from tests.launching import survive


@pytest.mark.full
def test_memory_falls_when_a_measured_window_is_smaller_and_a_kill_after_that_costs_nothing(tmp_path: Path) -> None:
    """Train with plain data parallelism: windows of eight iterations until rates are measured, then of fewer."""
    iterations, killed_at = 110, 95
    job: dict[str, Any] = SPARSE | {
        "train_iters": iterations, "global_batch_size": 2, "micro_batch_size": 1, "hidden_size": 128,
        "moe_ffn_hidden_size": 256,
    }  # fmt: skip
    wanted = failure_free_digest(2, **job)
    survived = survive(
        2, 1, tmp_path / "run", inject=(f"rank=1,iteration={killed_at},phase=backward",), **job | {
            "moevement_window": "auto", "moevement_bandwidth": "100", "moevement_network_bandwidth": "100",
            "moevement_replicas": 1, "moevement_overhead_cap": 0.99,
        },
    )  # fmt: skip
    assert survived.digest == wanted
    survived.check_metrics(iterations)
    lines = [line for line in survived.record.metrics() if "snapshot_memory_bytes" in line]
    assert {line["window"] for line in lines if line["iteration"] < 8} == {8}
    assert max(line["window"] for line in lines if line["iteration"] > 16) < 8
    held = {line["iteration"]: line["snapshot_memory_bytes"] for line in lines}
    before = max(nbytes for iteration, nbytes in held.items() if iteration <= 12)
    assert held[killed_at - 2] < before
    assert held[iterations] < before, "nor does a failure bring it back"
