"""Every order of popularity in a job follows the paper's formula, on counts that the test makes itself."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.functional.orders import CHANCES, TOKENS, counted_and_ordered
from tests.harness import run_ranks
from tests.training import SCRIPT, flags

RANKS, WINDOW, ITERATIONS = 2, 2, 9
EXPERTS, TOPK, ROUTED = 4, 2, 2 * 32
"""Experts of a layer, experts of a token, and tokens of a router in a micro-batch, of the job in tests/training.py."""
ALPHA, FACTOR = 0.5, 0.75
JOB: dict[str, Any] = {
    "train_iters": ITERATIONS, "expert_model_parallel_size": RANKS, "moevement_sparse_ckpt": True,
    "moevement_ranks_per_node": 1, "moevement_window": WINDOW, "moevement_replicas": 1,
    "moevement_reorder_threshold": 0.0, "moevement_reorder_fraction": 0.0,
}  # fmt: skip
PADDED: dict[str, Any] = {"moe_expert_capacity_factor": FACTOR, "moe_pad_expert_input_to_capacity": True}
ORDERS: dict[str, dict[str, Any]] = {
    "hard": {},
    "soft": {},
    "decayed": {"moevement_order_alpha": ALPHA},
    "capacity": {"moe_expert_capacity_factor": FACTOR},
    "capacity, padded": PADDED,
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_every_window_follows_from_an_independent_count(case: str) -> None:
    order = case.partition(",")[0]
    words = flags(**JOB, **ORDERS[case], moevement_order=order)
    ended = run_ranks(counted_and_ordered, RANKS, [str(SCRIPT), *words], init_process_group=False)
    results = [outcome.result for outcome in ended]
    counts = _summed(results, CHANCES if order == "soft" else TOKENS)
    first, *_ = results
    windows = [start for start in first["orders"] if start > 0]
    assert windows == [2, 4, 6, 8]
    assert all(result["orders"] == first["orders"] for result in results), "the ranks of a stage agree"
    for start in windows:
        # Ranks use the sums of a window when the next window begins.
        expected = _popularity(order, [counts[iteration] for iteration in range(1, start - WINDOW + 1)])
        for expert, score in first["scores"][start].items():
            assert score == pytest.approx(expected[expert], rel=1e-5), (start, expert)
        for experts in _by_rank(first["orders"][start]):
            popularity = [expected[expert] for expert in experts]
            assert popularity == pytest.approx(sorted(popularity), rel=1e-5), (start, experts)
    assert any(experts != sorted(experts) for experts in _by_rank(first["orders"][8])), "not the order of the table"


def _summed(results: list[dict[str, Any]], what: str) -> dict[int, Counter[str]]:
    """Return the counts of each iteration, summed over the ranks of the stage."""
    return {
        iteration: sum((Counter(result[what][iteration]) for result in results), Counter())
        for iteration in range(1, ITERATIONS + 1)
    }


def _popularity(order: str, history: list[Counter[str]]) -> dict[str, float]:
    """Return the popularity of each expert by the formulas of MoEvement, section 3.5 and appendix B."""
    scores: defaultdict[str, float] = defaultdict(float)
    for counts in history:
        for expert in {*scores, *counts}:
            if order == "decayed":
                scores[expert] = ALPHA * scores[expert] + (1 - ALPHA) * counts[expert]
            else:
                scores[expert] += counts[expert]
    if order == "capacity":
        capacity = math.ceil(ROUTED * TOPK / EXPERTS * FACTOR)
        scores.update({expert: score / capacity for expert, score in scores.items()})
    return scores


def _by_rank(order: list[str]) -> list[list[str]]:
    """Return the experts of each rank in an order of all operators; a rank has half of a layer's experts."""
    experts = [name for name in order if ".experts." in name]
    share = EXPERTS // RANKS
    return [[name for name in experts if int(name.rpartition(".")[2]) // share == rank] for rank in range(RANKS)]
