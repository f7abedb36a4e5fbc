"""The batch script as shipped, on a cluster of three nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.training import Baselines, assert_equal_runs, train

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_training_on_three_nodes_is_that_of_one_host(cluster: Cluster, baselines: Baselines, tmp_path: Path) -> None:
    wanted = baselines.of()
    training = train(cluster, tmp_path)
    training.wait_for_iteration(1)
    assert [training.ranks_on(name) for name in ("n1", "n2", "n3")] == [[0, 1], [2, 3], []]
    training.wait()
    assert_equal_runs(training, wanted)
