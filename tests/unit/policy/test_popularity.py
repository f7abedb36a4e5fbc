"""Operators are ordered by the tokens of their experts, in the same order on every rank."""

from __future__ import annotations

import math
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.errors import ConfigError, PopularityError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.popularity import Ordering, OrderingConfig, Popularity, counts_of, order_operators
from tests.unit.policy.tables import equal_experts

SOME = StateBytes(2, 4, 8)
KINDS = {
    "embedding": OperatorKind.EMBEDDING,
    "head": OperatorKind.HEAD,
    "layers.0.experts.0": OperatorKind.EXPERT,
    "layers.0.experts.1": OperatorKind.EXPERT,
    "layers.0.gate": OperatorKind.GATE,
    "layers.0.non_expert": OperatorKind.NON_EXPERT,
    "layers.11.experts.0": OperatorKind.EXPERT,
    "layers.11.experts.1": OperatorKind.EXPERT,
}
MOE = OperatorTable(Operator(name, kind, SOME) for name, kind in KINDS.items())
COUNTS = {"layers.0.experts.0": 7, "layers.0.experts.1": 2, "layers.11.experts.0": 5, "layers.11.experts.1": 2}


def names(order: np.ndarray, table: OperatorTable = MOE) -> list[str]:
    return [table.names[place] for place in order]


def test_unpopular_experts_first_then_what_serves_every_token_and_ties_by_name() -> None:
    assert names(order_operators(MOE, counts_of(MOE, COUNTS))) == [
        "layers.0.experts.1", "layers.11.experts.1", "layers.11.experts.0", "layers.0.experts.0",
        "embedding", "head", "layers.0.gate", "layers.0.non_expert",
    ]  # fmt: skip


def test_back_to_front_goes_from_the_head_to_the_embedding() -> None:
    dense = OperatorTable(
        [
            Operator("embedding", OperatorKind.EMBEDDING, SOME),
            Operator("head", OperatorKind.HEAD, SOME),
            *(Operator(f"layers.{layer}", OperatorKind.LAYER, SOME) for layer in (10, 2, 0)),
        ]
    )
    order = order_operators(dense, np.zeros(5), Ordering.BACK_TO_FRONT)
    assert names(order, dense) == ["head", "layers.10", "layers.2", "layers.0", "embedding"]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.randoms())
def test_an_order_does_not_depend_on_the_order_in_which_operators_or_counts_come(counts: list[int], random) -> None:
    table = equal_experts(len(counts))
    given_counts = dict(zip(table.names, counts, strict=True))
    operators = [Operator(name, OperatorKind.EXPERT, SOME) for name in table.names]
    shuffled, entries = (
        random.sample(operators, len(operators)),
        random.sample(sorted(given_counts.items()), len(counts)),
    )
    other = OperatorTable(shuffled)
    assert names(order_operators(table, counts_of(table, given_counts)), table) == names(
        order_operators(other, counts_of(other, dict(entries))), other
    )


def test_counts_add_up_over_the_run_and_a_moving_average_forgets() -> None:
    table = equal_experts(2)
    history = np.array([[8.0, 0.0], [0.0, 4.0], [0.0, 2.0]])
    hard = Popularity(table, OrderingConfig(Ordering.HARD_COUNT))
    decayed = Popularity(table, OrderingConfig(Ordering.TIME_DECAYED, alpha=0.5))
    for counts in history:
        hard.observe(counts)
        decayed.observe(counts)
    np.testing.assert_array_equal(hard.scores, [8, 6])
    np.testing.assert_array_equal(decayed.scores, [8 / 8, 4 / 4 + 2 / 2])
    assert names(hard.order(), table) != names(decayed.order(), table)


def test_capacity_weighs_counts() -> None:
    table = equal_experts(2)
    popularity = Popularity(table, OrderingConfig(Ordering.CAPACITY), capacity=np.array([10.0, 1.0]))
    popularity.observe(np.array([20.0, 5.0]))
    np.testing.assert_array_equal(popularity.scores, [2, 5])
    assert names(popularity.order(), table) == list(table.names)


def test_capacity_and_the_ordering_that_needs_it_come_together() -> None:
    table = equal_experts(2)
    for ordering, capacity in ((Ordering.CAPACITY, None), (Ordering.SOFT_COUNT, np.ones(2))):
        with pytest.raises(PopularityError, match=rf"\bordering {ordering}\b.*'capacity'"):
            Popularity(table, OrderingConfig(ordering), capacity)
    with pytest.raises(PopularityError, match=r"\bcapacity\b.*\blayers\.0\.experts\.1\b.*\b0\b"):
        Popularity(table, OrderingConfig(Ordering.CAPACITY), np.array([1.0, 0.0]))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_counts_that_cannot_be_are_refused_by_name_and_change_nothing(wrong: float) -> None:
    table = equal_experts(3)
    popularity = Popularity(table, OrderingConfig())
    popularity.observe(np.ones(3))
    with pytest.raises(PopularityError, match=rf"\blayers\.0\.experts\.1\b.* {re.escape(str(wrong))}\b"):
        popularity.observe(np.array([1.0, wrong, 1.0]))
    np.testing.assert_array_equal(popularity.scores, np.ones(3))
    with pytest.raises(PopularityError, match=r"\[2\].*\b3 operators\b"):
        popularity.observe(np.ones(2))


@pytest.mark.parametrize(
    ("counts", "pattern"),
    [
        (COUNTS | {"layers.5.experts.0": 1}, r"'layers\.5\.experts\.0'"),
        (COUNTS | {"layers.0.gate": 1}, r"\blayers\.0\.gate\b.*\bgate\b"),
        ({name: 1 for name in list(COUNTS)[1:]}, r"\blayers\.0\.experts\.0\b(?!.*\bnan\b)"),
        (COUNTS | {"layers.0.experts.0": math.nan}, r"\blayers\.0\.experts\.0\b.*\bnan\b"),
    ],
)
def test_counts_by_name_are_those_of_the_experts_all_of_them_and_no_others(counts: dict, pattern: str) -> None:
    with pytest.raises(PopularityError, match=pattern):
        counts_of(MOE, counts)


def test_settings_that_cannot_be_are_refused() -> None:
    for alpha in (1.0, -0.1, math.nan):
        with pytest.raises(ConfigError, match=rf"\balpha\b.* {re.escape(str(alpha))}\b"):
            OrderingConfig(alpha=alpha)
    with pytest.raises(ConfigError, match=r"\bordering 'random'.*\bhard\b.*\bsoft\b"):
        OrderingConfig(ordering="random")  # type: ignore[arg-type]


@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_ranks_are_saved_evenly_and_each_by_popularity(ranks: int, experts: int, random: Random) -> None:
    """Check that ranks save equally many experts, to one, and that each rank saves its popular experts first."""
    rows = [
        [Operator(expert_name(0, rank * experts + number), OperatorKind.EXPERT, SOME) for number in range(experts)]
        for rank in range(ranks)
    ]
    table = OperatorTable.of_ranks([OperatorTable(row) for row in rows])
    scores = np.array([random.randrange(100) for _ in range(len(table))], dtype=np.float64)
    order = order_operators(table, scores)
    assert sorted(order) == list(range(len(table)))
    saved = np.zeros(ranks, dtype=int)
    for place in order:
        saved[int(np.flatnonzero(table.full[:, place])[0])] += 1
        assert saved.max() - saved.min() <= 1
    for rank in range(ranks):
        own = [scores[place] for place in order if table.full[rank, place]]
        assert own == sorted(own)
