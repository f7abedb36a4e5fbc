"""Nodes of a job under Slurm are drained one after the other; no iteration is repeated, and every bit is equal."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from tests.cluster.cluster import Cluster
from tests.cluster.machine import send
from tests.cluster.training import PP2_EP2, Training, assert_undisturbed, train
from tests.training import ROOT

FLAGS: dict[str, Any] = {**PP2_EP2, "train_iters": 5000, "moevement_lease_seconds": 5.0}


def _drain(training: Training, node: str, to: str) -> None:
    """Drain a node whose ranks have to move to ``to``, take that back, and wait until the node has spares."""
    moves = len(training.events("failure"))
    assert main(["drain", str(training.run_dir), node]) == 0
    assert training.ranks_on(to) == [2, 3]
    before = training.iteration()
    training.wait_for_iteration(before + 3)
    (failure,) = training.events("failure")[moves:]
    recovery = failure["recovery"]
    assert (recovery["replayed"], recovery["redone"]) == (0, 0)
    assert sum(recovery["sources"].values()) == recovery["sources"]["replica"] == 2
    print(f"{node} drained: {failure['noticed_by']}, {failure['parts']}")
    assert main(["drain", str(training.run_dir), node, "--cancel"]) == 0
    training.wait_for_spares(2)


@pytest.mark.parametrize("moves", [2, pytest.param(10, marks=pytest.mark.full)])
def test_ranks_move_between_nodes(moves: int, cluster: Cluster, tmp_path: Path) -> None:
    training = train(cluster, tmp_path, **FLAGS)
    training.wait_for_iteration(6)
    for move in range(moves):
        _drain(training, *(("n2", "n3") if move % 2 == 0 else ("n3", "n2")))
    training.end()
    assert_undisturbed(training, **FLAGS)
    assert [line["iteration"] for line in training.record.metrics()] == list(range(1, training.iteration() + 1))
    assert "Traceback" not in training.job.text()


@pytest.mark.full
def test_a_rank_is_killed_while_a_node_is_drained(cluster: Cluster, tmp_path: Path) -> None:
    training = train(cluster, tmp_path, **FLAGS)
    training.wait_for_iteration(6)
    assert main(["drain", str(training.run_dir), "n2", "--no-wait"]) == 0
    training.resumes_after(training.kill_rank(1))
    training.wait_for_iteration(training.iteration() + 10)
    assert main(["drain", str(training.run_dir), "n2", "--cancel"]) == 0
    training.end()
    assert_undisturbed(training, **FLAGS)


@pytest.mark.full
@pytest.mark.parametrize("nodes", [["n2"], ["n2", "n3"]])
def test_a_scheduler_takes_nodes_away(nodes: list[str], cluster: Cluster, tmp_path: Path) -> None:
    """Send SIGUSR1 to the task of one node, whose ranks move, or of two, for whose ranks there are no spares."""
    training = train(cluster, tmp_path, **FLAGS)
    training.wait_for_iteration(6)
    for node in nodes:
        (task,) = cluster.machines[node].tasks()
        send(task, signal.SIGUSR1)
    if nodes == ["n2"]:
        failure = training.wait_for_event("failure")[0]
        assert "SIGUSR1" in failure["failures"][0]
        assert (training.ranks_on("n3"), failure["recovery"]["replayed"]) == ([2, 3], 0)
        training.wait_for_iteration(training.iteration() + 5)
        training.end()
    else:
        training.wait()
        assert training.events("failure") == []
    assert_undisturbed(training, **FLAGS)


@pytest.mark.full
def test_a_node_whose_health_check_fails_drains_itself(cluster: Cluster, tmp_path: Path) -> None:
    """Let the check of n2 fail: its ranks move to n3, and n2 has spares once the check succeeds again."""
    check = f"test ! -e {tmp_path}/ill-$(hostname)"
    training = train(cluster, tmp_path, **FLAGS, moevement_health_check=check, moevement_health_seconds=1.0)
    training.wait_for_iteration(6)
    (tmp_path / "ill-n2").touch()
    failure = training.wait_for_event("failure")[0]
    assert "health check" in failure["failures"][0]
    assert (training.ranks_on("n3"), failure["recovery"]["replayed"]) == ([2, 3], 0)
    (tmp_path / "ill-n2").unlink()
    training.wait_for_spares(2)
    (tmp_path / "ill-n3").touch()
    training.wait_for_event("failure", 2)
    assert training.ranks_on("n2") == [2, 3]
    training.end()
    assert_undisturbed(training, **FLAGS)


@pytest.mark.full
def test_a_node_that_slurm_drains_gives_its_ranks_away(cluster: Cluster, tmp_path: Path) -> None:
    """Drain a node in Slurm, which leaves its jobs alone, and resume it; the job follows by the command of the page."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    check = re.search(r"--moevement-health-check '(! sinfo .*)'", page)
    assert check is not None
    training = train(cluster, tmp_path, **FLAGS, moevement_health_check=check[1], moevement_health_seconds=1.0)
    training.wait_for_iteration(6)
    cluster.slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=fan")
    failure = training.wait_for_event("failure")[0]
    assert "fan" in failure["failures"][0]
    assert (training.ranks_on("n3"), failure["recovery"]["replayed"]) == ([2, 3], 0)
    cluster.slurm("scontrol", "update", "nodename=n2", "state=resume")
    training.wait_for_spares(2)
    training.end()
    assert_undisturbed(training, **FLAGS)
