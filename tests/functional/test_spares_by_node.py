"""Ranks that exchange tokens in every layer stay on one node after losses; each pair of processes is a node here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import LAYOUTS, SPARSE
from tests.launching import survive


@pytest.mark.full
@pytest.mark.slow("four ranks, three kills, and a process that is waited for")
def test_a_rank_is_replaced_on_its_node_and_a_node_by_a_node(tmp_path: Path) -> None:
    """Kill rank 1 while two spares wait on another node, then ranks 2 and 3, which are a node."""
    nproc, layout = LAYOUTS["PP2xEP2"]
    flags_ = SPARSE | layout | {"train_iters": 12, "moevement_replicas": 1, "moevement_replicas_on_same_node": False}
    wanted = failure_free_digest(nproc, **flags_, moevement_ranks_per_node=2)
    faults = tuple(f"rank={rank},iteration={at},phase=start" for rank, at in ((1, 5), (2, 9), (3, 9)))
    survived = survive(nproc, 2, tmp_path / "run", options=("--ranks-per-node", "2"), inject=faults, **flags_)
    assert survived.digest == wanted
    survived.check_metrics(12)
    nodes = {process["rank"]: process["node"] for process in survived.ranks() if process["role"] == "active"}
    assert nodes[0] == nodes[1] == "0"
    assert nodes[2] == nodes[3]
    assert survived.events("groups_split") == []
    first = survived.failures()[0]
    assert len(first["failures"]) == 1


@pytest.mark.slow("four ranks, and a node that is replaced by two")
@pytest.mark.full
def test_a_group_that_comes_to_span_nodes_is_reported_once(tmp_path: Path) -> None:
    """Kill rank 1 of a job that starts no new processes and has its spares on another node."""
    nproc, layout = LAYOUTS["PP2xEP2"]
    flags_ = SPARSE | layout | {"train_iters": 12, "moevement_replicas": 1}
    wanted = failure_free_digest(nproc, **flags_, moevement_ranks_per_node=2)
    options = ("--ranks-per-node", "2", "--respawn-after", "inf")
    faults = ("rank=1,iteration=5,phase=start", "rank=2,iteration=9,phase=start")
    survived = survive(nproc, 2, tmp_path / "run", options=options, inject=faults, **flags_)
    assert survived.digest == wanted
    splits = [(event["ranks"], event["nodes"]) for event in survived.events("groups_split")]
    assert splits == [([[0, 1]], [["0", "2"]]), ([[2, 3]], [["1", "2"]])]
