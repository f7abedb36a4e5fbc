"""Bytes that an iteration may save follow the measured cost."""

from __future__ import annotations

import math
from random import Random

import pytest

from moevement_core.overhead.cap import (
    AIM,
    CLEAR,
    FEWEST,
    FEWEST_CLEAR,
    FEWEST_TO_GROW,
    LEAST_STEP,
    MOST_STEP,
    MOST_STEP_FOR_FAILURES,
    Evidence,
    factor,
    worthwhile,
)

CAP = 0.02


@pytest.mark.parametrize(
    ("evidence", "wanted"),
    [
        (None, 1.0),
        (Evidence(0.5, 0.0, FEWEST_CLEAR - 1), 1.0),
        (Evidence(0.15, 0.04, FEWEST_CLEAR), AIM * CAP / 0.19),
        (Evidence(0.5, 0.24, FEWEST_CLEAR), 1.0),
        (Evidence(CLEAR * CAP, 0.0, FEWEST - 1), 1.0),
        (Evidence(0.04, 0.001, FEWEST), AIM * CAP / 0.041),
        (Evidence(5.0, 0.001, FEWEST), LEAST_STEP),
        (Evidence(0.04, 0.03, 16), 1.0),
        (Evidence(0.015, 0.001, 16), 1.0),
        (Evidence(0.005, 0.001, FEWEST_TO_GROW - 1), 1.0),
        (Evidence(0.009, 0.001, FEWEST_TO_GROW), AIM * CAP / 0.009),
        (Evidence(-0.01, 0.001, FEWEST_TO_GROW), MOST_STEP),
        (Evidence(0.0, 0.0, FEWEST_TO_GROW), MOST_STEP),
    ],
)
def test_bytes_fall_above_the_cap_and_grow_below_half_of_it(evidence: Evidence | None, wanted: float) -> None:
    assert factor(evidence, CAP) == pytest.approx(wanted)


def test_saving_and_repeated_iterations_together_cost_least_at_the_share_that_is_worthwhile() -> None:
    cost, period, failures_every = 0.02, 31, 60.0

    def in_all(factor: float) -> float:
        return cost * factor + period / factor / (2 * failures_every)

    worth = worthwhile(Evidence(cost, 0.0, 16), period, failures_every)
    best = min((1 + step / 100 for step in range(2000)), key=in_all)
    assert cost * best == pytest.approx(worth, rel=0.01)
    assert worthwhile(Evidence(cost, 0.0, 16), period, math.inf) == 0.0
    assert worthwhile(Evidence(-cost, 0.0, 16), period, failures_every) == 0.0


@pytest.mark.parametrize(
    ("evidence", "worth", "wanted"),
    [
        (Evidence(0.02, 0.01, FEWEST_CLEAR), 0.07, 3.5),
        (Evidence(0.02, 0.01, FEWEST_CLEAR - 1), 0.07, 1.0),
        (Evidence(0.001, 0.01, FEWEST_CLEAR), 0.07, MOST_STEP_FOR_FAILURES),
        (Evidence(0.06, 0.001, 16), 0.07, 1.0),
        (Evidence(0.14, 0.0, FEWEST), 0.07, AIM / 2),
        (Evidence(0.04, 0.0, FEWEST), CAP / 2, AIM / 2),
    ],
)
def test_bytes_grow_above_the_cap_while_ranks_fail_often(evidence: Evidence, worth: float, wanted: float) -> None:
    assert factor(evidence, CAP, worth) == pytest.approx(wanted)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("slope", [0.5, 0.05, 0.002])
@pytest.mark.parametrize("seed", range(3))
def test_a_cost_in_proportion_to_bytes_settles_below_the_cap(slope: float, noise: float, seed: int) -> None:
    """Check a job that saves at least 1/64 of its state in each iteration. Saving all of its state costs ``slope``.

    After 40 decisions the bandwidth of its links halves, so the cost doubles.
    """
    draw, share_of_state, spent = Random(seed), 0.3, []
    for decision in range(80):
        cost = slope * share_of_state * (2 if decision >= 40 else 1)
        spent.append(cost)
        error = noise / 4
        evidence = Evidence(cost + draw.gauss(0, error), error, 16)
        share_of_state = min(1.0, max(1 / 64, share_of_state * factor(evidence, CAP)))
    least = slope / 64
    for settled in (spent[20:40], spent[60:]):
        assert sum(settled) / len(settled) <= max(1.1 * CAP, 2.1 * least)
    if slope == 0.002:
        assert min(spent[20:]) >= slope * 0.9, "what costs nothing is saved in every iteration"
