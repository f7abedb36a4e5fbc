"""Allocation of replicas follows the loads by equation 1 of Lazarus, and has the properties that the paper states."""

from __future__ import annotations

import numpy as np
import pytest

from moevement_core.elastic.allocation import allocate, better_allocation, slowest_share
from moevement_core.errors import ConfigError


def test_a_worked_example() -> None:
    """Check 12 slots and at least 2 replicas per expert. Experts get slots in ascending order of loads.

    The expert with 10 of 200 tokens gets the minimum. The next one has 40 of the other 190 tokens and gets two of the
    other ten slots. The expert with 50 of the last 150 tokens gets two of the last eight slots.
    """
    assert allocate([100, 10, 40, 50], 12, 2).tolist() == [6, 2, 2, 2]
    assert allocate([0, 0, 0], 7, 1).tolist() == [2, 2, 3]


@pytest.mark.parametrize("seed", range(200))
def test_what_the_paper_says_of_it_holds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    experts, nodes, slots, floor = (int(draw.integers(low, high)) for low, high in ((1, 20), (1, 12), (1, 9), (1, 4)))
    if nodes * slots < experts:
        slots = -(-experts // nodes)
    tokens = np.floor(draw.pareto(1.0, experts) * 100).astype(np.int64)
    replicas = allocate(tokens, nodes * slots, floor)
    assert replicas.sum() == nodes * slots
    assert replicas.min() >= min(floor, nodes * slots // experts)
    assert (np.diff(replicas[np.argsort(tokens, kind="stable")]) >= 0).all(), "the order of loads is that of replicas"


def test_with_many_slots_replicas_are_in_proportion() -> None:
    tokens = np.array([1, 5, 20, 74])
    replicas = allocate(tokens, 10_000, 1)
    assert slowest_share(tokens, replicas) == pytest.approx(1.0, rel=0.02)
    assert slowest_share(tokens, np.array([2500] * 4)) == pytest.approx(4 * 0.74)


@pytest.mark.parametrize(
    ("tokens", "slots", "floor", "pattern"),
    [([1, 2], 1, 1, r"\b1 slot.*\b2 experts\b"), ([1, -2], 4, 1, r"\btokens \[1, -2\]"), ([], 4, 1, r"\btokens \[\]"),
     ([1], 4, 0, r"\b0 for each\b")],
)  # fmt: skip
def test_what_cannot_be_is_said(tokens: list[int], slots: int, floor: int, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        allocate(tokens, slots, floor)


def test_a_fluctuation_is_waited_out_and_a_shift_is_followed() -> None:
    replicas = allocate([10, 10, 10, 10], 8, 1)
    assert better_allocation([12, 8, 10, 10], replicas, floor=1, gain=0.2) is None
    shifted = better_allocation([40, 1, 1, 1], replicas, floor=1, gain=0.2)
    assert shifted is not None
    assert shifted.tolist() == [5, 1, 1, 1]
    assert better_allocation([40, 1, 1, 1], shifted, floor=1, gain=0.0) is None, "nothing would change"
