"""A loss spike on a cluster whose nodes have folders of their own for windows, and the loss of a node afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.verify import compare
from tests.cluster.cluster import Cluster
from tests.cluster.training import PP2_EP2, RANKS, SPARSE, train
from tests.failure_free import failure_free

SPIKE = 30
FLAGS: dict[str, Any] = {**PP2_EP2, "train_iters": 5000, "moevement_lease_seconds": 5.0}


@pytest.mark.full
def test_a_job_goes_back_and_then_loses_a_node(cluster: Cluster, tmp_path: Path) -> None:
    training = train(
        cluster, tmp_path, environment={"SPIKE": str(SPIKE)}, **FLAGS,
        moevement_persist_dir=str(tmp_path / "windows-{node}"), moevement_keep_windows=6,
        moevement_rollback_on_spike=2.5, moevement_rollback_by=5,
    )  # fmt: skip
    (event,) = training.wait_for_event("loss_spiked")
    assert (event["iteration"], event["rolls_back"]) == (SPIKE, True)
    restores = training.wait_for_event("restart")[0]["iteration"]
    assert SPIKE - 20 < restores <= SPIKE - 5
    training.wait_for_iteration(SPIKE + 4)
    training.resumes_after(cluster.kill_node("n2"))
    training.wait_for_iteration(training.iteration() + 4)
    cluster.take_down("n2")
    last = training.end()
    skipped = list(range(restores + 1, SPIKE + 1))
    wanted = failure_free(RANKS, **SPARSE | FLAGS | {"exit_interval": last, "iterations_to_skip": skipped})
    verdict = compare(wanted, training.record)
    assert verdict.equal, verdict.first_difference
