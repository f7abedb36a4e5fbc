"""Computations of the page on elastic experts, on cases that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from benchmarks import elastic, elastic_failures, elastic_transfers
from benchmarks.elastic_failures import fail_one_by_one, failure_rows, orders
from benchmarks.elastic_transfers import reconfigure, tables
from benchmarks.lazarus_testbed import NODES, job_of, routed
from moevement_core.simulator.elastic import System

EVEN = np.full((2, 1, 8), 100)


def test_rates_between_failures_of_one_node_after_the_other() -> None:
    """Train with four sequences on each of ten nodes. Groups have two nodes, so nine nodes train as eight do."""
    job = replace(job_of("GPT-S", System.REGROUP), iteration_s=1.0, checkpoint_s=0.0, expert_bytes=0.0)
    lost = ["n9", "n7"]
    done, rates = fail_one_by_one(job, System.REGROUP, EVEN, lost, between_s=100.0)
    assert rates == pytest.approx([40.0, 75.0 * 32 / 100, 75.0 * 24 / 100])
    assert done.changes == 2
    restarts = replace(job, checkpoint_every=50, restart_s=25.0)
    _, restarted = fail_one_by_one(restarts, System.RESTART, EVEN, lost, between_s=100.0)
    # The first failure comes right after a checkpoint, and the second takes 25 of 75 iterations; eight nodes are left.
    assert restarted == pytest.approx([40.0, 75.0 * 32 / 100, (75.0 - 25.0) * 32 / 100])


def test_half_of_the_nodes_fail_once_each() -> None:
    assert all(len(set(order)) == len(order) == NODES // 2 for order in orders())
    assert len({tuple(order) for order in orders()}) == elastic_failures.ORDERS


def test_every_figure_model_and_system_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_failures, "ORDERS", 1)
    setting = elastic_failures.Setting(200.0, 1.0)
    monkeypatch.setattr(elastic_failures, "SETTINGS", {6: setting, 7: setting})
    totals, rates = failure_rows(np.random.default_rng(5).integers(1, 1000, (3, 4, 32)))
    assert len(totals) == len(rates) == 2 * 3 * len(System)
    assert {len(row) for row in totals} == {len(elastic_failures.HEADER)}
    assert {len(row) for row in rates} == {len(elastic_failures.NODES_HEADER)}
    assert [row[6] for row in totals if row[:2] == ["6", "GPT-L"]] == ["", "2.8x", "5.7x"]


FOUR_NODES = ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("alive", "moved"),
    [
        # Of twelve experts with equal loads, 0 to 5 are on the nodes 0 and 1, and the others on the nodes 2 and 3. On
        # three nodes, experts 6 to 11 have two replicas each.
        pytest.param([1, 2, 3], 0, id="what is left is what is wanted"),
        pytest.param([0, 1, 2], 6, id="a node changes to the other group"),
        pytest.param([2, 3], None, id="half of the experts are lost"),
    ],
)
def test_experts_moved_after_a_loss(alive: list[int], moved: int | None) -> None:
    loads = np.full((2, 12), 50)
    before = tables(loads, FOUR_NODES, {})
    assert before[1] == ((*range(6),), (*range(6),), (*range(6, 12),), (*range(6, 12),))
    plan = reconfigure(loads, before, alive)
    if moved is None:
        assert plan is None
        return
    assert plan is not None
    assert (plan.moved, plan.moved_alone) == (2 * moved, 2 * moved)
    assert plan.most_sends == 2 * moved, "node 2 alone holds what is fetched"


def test_the_table_of_transfers_has_each_published_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_transfers, "CASES", elastic_transfers.CASES[:1])
    tokens = np.random.default_rng(5).integers(1, 1000, (3, 4, 32))
    (row,) = elastic_transfers.transfer_rows(tokens, np.array([1, 201, 401]))
    assert len(row) == len(elastic_transfers.HEADER)
    assert row[:3] == ["GPT-S", "201", "2"]
    assert 0 < int(row[3]) <= 45
    assert row[6] == "11"


def test_survival_by_load_ratio() -> None:
    """Compare with counts by hand.

    At 1:1, the 60 slots hold four experts seven times and four eight times. Six experts are on seven nodes each. The
    other two are on the three nodes that are left, and are lost with them. At 2:1, six experts are on six nodes, and
    two on four.
    """
    by_case = {(ratio, placement): values for ratio, placement, *values in elastic.ratio_rows()}
    assert len(by_case) == 2 * len(elastic.RATIOS)
    lost_with_three = [1 - comb(7, lost - 3) / comb(10, lost) if lost >= 3 else 1.0 for lost in range(1, 7)]
    assert by_case["1:1", elastic.OVERLAP] == [f"{value:.2f}" for value in lost_with_three]
    assert by_case["1:1", "spread"] == ["1.00"] * 6, "every expert is on seven nodes"
    assert by_case["2:1", elastic.OVERLAP][-1] == f"{1 - (1 + comb(6, 2)) / comb(10, 6):.2f}"
    assert by_case["4:1", elastic.OVERLAP][3] == f"{1 - 2 / comb(10, 4):.2f}", "two groups of four nodes"


@pytest.mark.parametrize(
    ("tokens", "ratio", "wanted"),
    [(16, 1, [2, 2, 2, 2, 2, 2, 2, 2]), (16, 2, [4, 2, 2, 2, 2, 2, 1, 1]), (16, 8, [16, 0, 0, 0, 0, 0, 0, 0])],
)
def test_tokens_by_load_ratio(tokens: int, ratio: int, wanted: list[int]) -> None:
    assert routed(tokens, 8, ratio) == wanted


def test_a_load_ratio_above_the_number_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="load ratio 9 with 8 experts"):
        routed(16, 8, 9)
