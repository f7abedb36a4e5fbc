"""A job under Slurm finds a device that computes wrong results, on any node, and ends with the right bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.training import PP2_EP2, assert_undisturbed, train

FLAGS: dict[str, Any] = {**PP2_EP2, "train_iters": 2000}
FAULT = "part=gradient,rank=3,iteration=16,times=always,seed=1"


def test_a_node_that_computes_wrong_results_is_found_and_a_rank_of_another_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Let rank 3 on n2 compute wrong gradients from an iteration on that its stage audits, and kill rank 0 later."""
    training = train(cluster, tmp_path, **FLAGS, moevement_audit_interval=4, moevement_inject_corruption=FAULT)
    (event,) = training.wait_for_event("corrupted")
    assert (event["iteration"], event["ranks"], event["nodes"]) == (16, [3], ["n2"])
    training.wait_for_iteration(20)
    assert training.node_of(3) == "n3"
    training.resumes_after(training.kill_rank(0))
    training.wait_for_iteration(training.iteration() + 10)
    training.end()
    assert len(training.events("corrupted")) == 1
    assert_undisturbed(training, **FLAGS)
