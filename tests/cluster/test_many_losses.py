"""Nodes that are lost one after the other, at times and in ways that a seed determines (``make test-full``)."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.training import PP4, SPARES, assert_undisturbed, train

LOSSES = 8
LAYOUTS: dict[str, dict[str, Any]] = {"PP2xEP2": {}, "PP4": PP4}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_losses_drawn_by_a_seed(cluster: Cluster, tmp_path: Path, layout: str, seed: int) -> None:
    draw = random.Random(seed)
    flags = {"train_iters": 100_000, "moevement_lease_seconds": draw.choice([2, 5, 10]), **LAYOUTS[layout]}
    windows = str(tmp_path / "windows")
    training = train(
        cluster, tmp_path, **flags, moevement_persist_dir=windows, moevement_load=windows,
        tasks_per_node=1 if seed % 2 else 2,
    )  # fmt: skip
    training.wait_for_iteration(8)
    failures = {
        "killed": (cluster.kill_node, cluster.restart_node), "power lost": (cluster.lose_power, cluster.restart_node),
        "cut off": (cluster.cut_link, cluster.mend_link), "frozen": (cluster.freeze_node, cluster.thaw_node),
    }  # fmt: skip
    for number in range(LOSSES):
        how, after_s = draw.choice(list(failures)), draw.uniform(0.0, 3.0)
        lose, undo = failures[how]
        node = training.node_of(2)
        time.sleep(after_s)
        seconds = training.resumes_after(lose(node))
        print(
            f"seed {seed}, loss {number + 1}: {node} {how} after {after_s:.2f} s; next iteration {seconds:.1f} s later"
        )
        undo(node)
        training.wait_for_spares(SPARES)
    training.end()
    assert_undisturbed(training, **flags)
    assert len(training.events("failure")) == LOSSES
