"""A node whose link carries a tenth of what the links of other nodes carry is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from moevement_core.speed.compare import SENDING
from tests.cluster.cluster import Cluster
from tests.cluster.training import PP4, assert_undisturbed, train
from tests.training import SCRIPT

USUAL, SLOW = 40.0, 4.0
"""Rates of links in Mbit/s."""


@pytest.mark.full
def test_a_node_with_a_slow_link_is_named(six_nodes: Cluster, tmp_path: Path) -> None:
    """Give each rank a node, and let all links carry less than the copies need, so that their rates can be compared."""
    overrides = {**PP4, "train_iters": 5000, "moevement_lease_seconds": 5.0, "moe_ffn_hidden_size": 384}
    for number in range(1, 7):
        six_nodes.slow_link(f"n{number}", USUAL)
    training = train(
        six_nodes, tmp_path, environment={"SCRIPT": str(SCRIPT)}, nodes=6, processes_per_node=1, **overrides
    )
    training.wait_for_iteration(60)
    assert training.events("slow") == []
    six_nodes.slow_link("n3", SLOW)
    (event,) = training.wait_for_event("slow")
    assert (event["ranks"], event["node"], event["phase"]) == ([2], "n3", SENDING)
    six_nodes.slow_link("n3", None)
    training.end()
    assert_undisturbed(training, **overrides)
