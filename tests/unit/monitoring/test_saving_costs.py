"""Reports show the cost of saving as the record has it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moevement_cli.saving_costs import NO_INTERVAL, NotMeasured, SavingCosts, percent, view
from moevement_core.overhead.fields import FIELDS, FIRST_MEASURED
from tests.unit.monitoring.runs import line


def unmeasured(iteration: int) -> dict[str, Any]:
    return {name: value for name, value in line(iteration).items() if name not in FIELDS}


def test_the_last_value_is_shown_with_its_iteration() -> None:
    costs = SavingCosts([unmeasured(1), line(2, overhead=0.5), line(3), unmeasured(4)])
    assert costs.reason is None
    assert costs.as_json() == {
        "iteration": 3, "share": 0.02, "low": 0.01, "high": 0.03, "allowed": 0.025,
        "parts": {"copy": 0.004, "digest": 0.003, "send": 0.01, "policy": 0.001, "stall": 0.002},
    }  # fmt: skip
    assert costs.text() == "2.0% (1.0% to 3.0%)"
    assert costs.points()[1:3] == [(2, 50.0), (3, 2.0)]
    assert costs.intervals()[2] == (3, 1.0, 3.0)
    assert all(math.isnan(points[at][1]) for points in (costs.points(), costs.intervals()) for at in (0, 3))


def test_an_interval_that_is_not_known_is_said_and_a_gap() -> None:
    costs = SavingCosts([line(1, overhead_low=None, overhead_high=None, overhead_allowed=None)])
    assert costs.text() == f"2.0% ({NO_INTERVAL})"
    assert math.isnan(costs.intervals()[0][1])
    assert view([costs]) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([{"iteration": 1, "loss": 2.0}] * 20, NotMeasured.NO_CHECKPOINTS),
        ([unmeasured(number) for number in range(1, FIRST_MEASURED)], NotMeasured.TOO_SHORT),
        ([unmeasured(number) for number in range(1, FIRST_MEASURED + 1)], NotMeasured.NOT_COMPARED),
    ],
)
def test_why_nothing_was_measured(lines: list[dict[str, Any]], reason: NotMeasured) -> None:
    costs = SavingCosts(lines)
    assert (costs.newest, costs.reason, costs.as_json()) == (None, reason, None)
    assert costs.reason_text
    assert str(FIRST_MEASURED) in costs.reason_text or reason is not NotMeasured.TOO_SHORT


def test_a_drawing_shows_zero_all_values_and_the_newest_intervals() -> None:
    wide = SavingCosts([line(1, overhead=-0.01, overhead_low=-0.5, overhead_high=0.9), line(2)])
    low = SavingCosts([line(1, overhead=0.01, overhead_low=-0.02, overhead_high=0.01)])
    assert view([wide]) == (-1.0, 3.0)
    assert view([wide, low]) == (-2.0, 3.0)
    assert view([SavingCosts([unmeasured(1)])]) == (0.0, 0.0)


def test_no_share_is_less_than_nothing_by_rounding() -> None:
    assert [percent(share) for share in (-0.0004, 0.0004, -0.0006, 0.0206)] == ["0.0%", "0.0%", "-0.1%", "2.1%"]
