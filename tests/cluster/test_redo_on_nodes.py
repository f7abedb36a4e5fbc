"""Loss of a node under redo: its newest gradients are on other nodes, or the link could not carry them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.machine import wait_until
from tests.cluster.training import assert_undisturbed, train
from tests.training import SCRIPT

LEASE_S = 5.0
FLAGS: dict[str, Any] = {"train_iters": 5000, "moevement_lease_seconds": LEASE_S}
REDO: dict[str, Any] = {"moevement_recovery": "redo"}


def test_a_node_is_lost_and_its_ranks_alone_are_restored(cluster: Cluster, tmp_path: Path) -> None:
    training = train(cluster, tmp_path, **FLAGS | REDO)
    training.wait_for_iteration(12)
    training.resumes_after(cluster.lose_power("n2"))
    (failure,) = training.events("failure")
    assert failure["recovery"]["redone"] > 0
    assert set(failure["recovery"]["ranks"]) <= {2, 3} or failure["recovery"]["replayed"] > 0, failure
    print(failure["scope"], failure["recovery"])
    cluster.take_down("n2")
    training.end()
    assert_undisturbed(training, **FLAGS)


@pytest.mark.full
def test_gradients_that_the_link_cannot_carry(cluster: Cluster, tmp_path: Path) -> None:
    """Check that ranks replay the iterations whose gradients their peers lack.

    The slow link keeps the peers several iterations behind.
    """
    overrides = FLAGS | {"moe_ffn_hidden_size": 384}
    training = train(cluster, tmp_path, environment={"SCRIPT": str(SCRIPT)}, **overrides | REDO)
    training.wait_for_iteration(6)
    cluster.slow_link("n2", 8.0)

    def newest(metric: str) -> int:
        return int((training.record.newest_metric() or {})[metric])

    wait_until(lambda: newest("windows_abandoned") > 0, "a window is abandoned", training.everything)
    training.resumes_after(training.kill_rank(3))
    (failure,) = training.events("failure")
    assert failure["recovery"]["replayed"] > 1, failure
    print(failure["scope"], failure["recovery"])
    cluster.slow_link("n2", None)
    training.wait_for_iteration(training.iteration() + 12)
    training.resumes_after(training.kill_rank(1))
    print(training.events("failure")[-1]["recovery"])
    training.end()
    assert_undisturbed(training, **overrides)
