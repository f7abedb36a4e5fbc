"""Training runs whose nodes leave and join: lost work, waits, and elastic experts that use every node."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moevement_cli.examples import EXAMPLES
from moevement_cli.main import main
from moevement_core.errors import ConfigError
from moevement_core.simulator.availability import Change, changes, nodes_over_time, segment
from moevement_core.simulator.elastic import ElasticJob, ElasticTraining, System, most_loaded

JOB = ElasticJob(
    experts=8, slots=4, floor=2, iteration_s=1.0, nodes=4, expert_bytes=0.0, checkpoint_every=100, checkpoint_s=0.0,
    regroup_s=10.0, restart_s=50.0, wait_s=30.0,
)  # fmt: skip
EVEN = np.full((1, 2, 8), 100)
FOUR = ["a", "b", "c", "d"]


def trained(system: System, trace: list[Change], until_s: float, loads: np.ndarray = EVEN) -> ElasticTraining:
    training = ElasticTraining(JOB, system, loads, 10, FOUR)
    training.run(trace, until_s)
    return training


@pytest.mark.parametrize("system", list(System))
def test_without_changes_all_train_alike(system: System) -> None:
    done = trained(system, [], 250.0).done
    assert done.iterations == pytest.approx(250.0)
    assert (done.changes, done.fallbacks) == (0, 0)


def test_elastic_experts_use_three_nodes_of_four_and_lose_nothing() -> None:
    done = trained(System.LAZARUS, [Change(150.0, removed=frozenset("d"))], 310.0).done
    # Of 8 experts in 12 slots, four have one replica, all on the same node, and four have two.
    slowest = 1.5
    assert done.iterations == pytest.approx(150.0 + 150.0 * 3 / 4 / (0.5 + 0.5 * slowest))
    assert (done.changes, done.fallbacks, done.lost_s["regroup"]) == (1, 0, 10.0)


def test_expert_parallelism_uses_two_of_three() -> None:
    """Use groups of two nodes; each group holds every expert once. A restart also loses work since the checkpoint."""
    trace = [Change(150.0, removed=frozenset("d"))]
    assert trained(System.REGROUP, trace, 310.0).done.iterations == pytest.approx(150.0 + 150.0 / 2)
    restarted = trained(System.RESTART, trace, 310.0).done
    assert restarted.iterations == pytest.approx(100.0 + 110.0 / 2)
    assert (restarted.fallbacks, restarted.lost_s["restart"]) == (1, 50.0)


def test_both_nodes_of_an_expert_lost_at_once_are_one_too_many() -> None:
    done = trained(System.REGROUP, [Change(150.0, removed=frozenset("abc"))], 400.0)
    assert done.done.fallbacks == 1
    assert done.done.iterations == 100.0, "one node is no group: it waits"


def test_what_waits_for_nodes_starts_again_from_storage() -> None:
    """Lose a node of the last group, and with it the work after the checkpoint; another node joins later."""
    trace = [Change(150.0, removed=frozenset("bd")), Change(200.0, removed=frozenset("c"))]
    waiting = trained(System.REGROUP, [*trace, Change(300.0, added=frozenset("e"))], 480.0)
    assert waiting.done.lost_s["restart"] == 50.0, "when a group is there again, 30 s after the node came"
    assert waiting.done.iterations == pytest.approx(100.0 + 100.0 / 2)


def test_nodes_that_come_are_gathered_and_those_that_go_are_not() -> None:
    trace = [
        Change(100.0, removed=frozenset("bd")),
        Change(200.0, added=frozenset("e")),
        Change(220.0, added=frozenset("f")),
    ]
    training = trained(System.REGROUP, trace, 500.0)
    assert training.done.changes == 2, "the loss, and both that came at once"
    assert training.done.iterations == pytest.approx(100.0 + 120.0 / 2 + 260.0)


PER_NODE = replace(JOB, is_batch_per_node=True)


def test_with_a_batch_per_node_fewer_nodes_train_fewer_samples_as_often() -> None:
    """Lose a node of four; groups of two nodes are left. Iterations take as long, with half of the samples."""
    trace = [Change(150.0, removed=frozenset("d"))]
    kept = ElasticTraining(PER_NODE, System.REGROUP, EVEN, every=10, first=FOUR).run(trace, 310.0)
    assert (kept.iterations, kept.batches) == pytest.approx((150.0 + 150.0, 150.0 + 150.0 / 2))
    restarted = ElasticTraining(PER_NODE, System.RESTART, EVEN, every=10, first=FOUR).run(trace, 310.0)
    assert (restarted.iterations, restarted.batches) == pytest.approx((100.0 + 110.0, 100.0 + 110.0 / 2))


def test_without_checkpoints_a_restart_begins_anew() -> None:
    job = replace(PER_NODE, checkpoint_every=math.inf, checkpoint_s=9.0)
    trace = [Change(150.0, removed=frozenset("d"))]
    done = ElasticTraining(job, System.RESTART, EVEN, every=10, first=FOUR).run(trace, 310.0)
    assert (done.iterations, done.batches) == pytest.approx((110.0, 110.0 / 2))
    assert done.lost_s["checkpoint"] == 0.0


def test_only_a_restart_takes_live_nodes_that_were_left_over() -> None:
    """Lose two of six nodes, one after the other. Groups have two nodes, so the first loss leaves one node unused."""
    trace = [Change(100.0, removed=frozenset("f")), Change(200.0, removed=frozenset("d"))]
    job = replace(PER_NODE, nodes=6)
    six = [*FOUR, "e", "f"]
    kept = ElasticTraining(job, System.REGROUP, EVEN, every=10, first=six).run(trace, 300.0)
    assert kept.batches == pytest.approx(100.0 + 90.0 * 4 / 6 + 90.0 * 2 / 6)
    assert (kept.changes, kept.fallbacks) == (2, 0)
    restarted = ElasticTraining(job, System.RESTART, EVEN, every=10, first=six).run(trace, 300.0)
    # The checkpoint after 100 iterations is there, and there is none of the 50 iterations after it.
    assert restarted.batches == pytest.approx(100.0 + 50.0 * 4 / 6)
    joined = ElasticTraining(job, System.REGROUP, EVEN, every=10, first=six)
    joined.run([*trace, Change(210.0, added=frozenset("g"))], 300.0)
    assert len(joined._members) == 4, "new nodes bring those that were left over back in"


def test_a_node_that_was_not_used_can_leave_unnoticed() -> None:
    trace = [Change(100.0, removed=frozenset("d")), Change(200.0, removed=frozenset("c"))]
    done = ElasticTraining(PER_NODE, System.REGROUP, EVEN, every=10, first=FOUR).run(trace, 300.0)
    assert (done.changes, done.lost_s["regroup"]) == (1, 10.0)


def test_the_most_loaded_experts_keep_their_order() -> None:
    tokens = np.array([[[5, 1, 9, 7], [1, 1, 1, 4]], [[5, 1, 9, 8], [3, 0, 1, 4]]])
    assert most_loaded(tokens, 2).tolist() == [[[9, 7], [1, 4]], [[9, 8], [3, 4]]]


def test_skewed_loads_are_followed() -> None:
    loads = np.tile(np.array([800, 10, 10, 10, 10, 10, 10, 10]), (1, 2, 1))
    job = replace(JOB, floor=1)
    elastic, equal = (
        ElasticTraining(job, system, loads, 10, FOUR).run([], 400.0).iterations
        for system in (System.LAZARUS, System.REGROUP)
    )
    assert elastic > 1.1 * equal


def test_the_command_names_who_is_ahead_and_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["elastic", str(EXAMPLES / "simulate" / "nodes.csv"), "--segment", "20000", "--layers", "2", "--json"]
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    iterations = {
        result["system"]: sum(segment["iterations"] for segment in result["segments"])
        for result in json.loads(last)["results"]
    }
    sentence = " ".join(lines[-3:])
    for other in ("regroup", "restart"):
        assert f"{iterations['lazarus'] / iterations[other] - 1:+.0%}" in sentence
        assert iterations["lazarus"] > iterations[other]
    assert main([*words, "--system", "regroup"]) == 0
    assert "%" not in capsys.readouterr().out


def test_a_segment_of_a_trace_has_a_cluster_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n0,add,c\n5000,remove,a\n9000,add,d\n12000,remove,b\n")
    first, later = segment(changes(path), 4.0, 20.0, most=2)
    assert first == ["a", "b"]
    assert later == [
        Change(1.0, frozenset("c"), frozenset("a")), Change(8.0, frozenset("d"), frozenset("b")),
    ]  # fmt: skip
    assert list(nodes_over_time(first, later, 16.0)) == [(0.0, 1.0, 2), (1.0, 8.0, 2), (8.0, 16.0, 2)]


@pytest.mark.parametrize("line", ["1,move,a", "x,add,a", "1,add"])
def test_what_is_no_trace_is_said(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"0,add,a\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        changes(path)
