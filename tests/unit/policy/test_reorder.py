"""Operators are reordered when enough experts have changed their share enough, and not before."""

from __future__ import annotations

import numpy as np
import pytest

from moevement_core.errors import ConfigError, PopularityError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name, gate_name
from moevement_core.policy.reorder import ReorderThresholds, ReorderTrigger
from tests.unit.policy.tables import equal_experts

REFERENCE = np.array([100.0, 100.0, 100.0, 100.0])


def trigger(reference: np.ndarray = REFERENCE, **thresholds: float) -> ReorderTrigger:
    reorder_trigger = ReorderTrigger(equal_experts(len(reference)), ReorderThresholds(**thresholds))
    reorder_trigger.ordered(reference)
    return reorder_trigger


@pytest.mark.parametrize(
    ("scores", "fraction", "fires"),
    [
        ([100, 100, 100, 100], 0.0, False),
        ([200, 200, 200, 200], 0.0, False),  # twice the tokens, the same shares
        ([110, 90, 100, 100], 0.0, False),  # changed by 10%, not by more
        ([111, 89, 100, 100], 0.5, True),
        ([112, 96, 96, 96], 0.25, True),  # exactly a quarter of the experts
        ([400, 0, 0, 0], 1.0, True),
    ],
)
def test_more_than_a_tenth_for_at_least_a_quarter(scores: list[float], fraction: float, fires: bool) -> None:
    reorder_trigger = trigger()
    assert reorder_trigger.changed_fraction(np.array(scores, dtype=float)) == fraction
    assert reorder_trigger.should_reorder(np.array(scores, dtype=float)) == fires


def test_thresholds_can_be_set() -> None:
    scores = np.array([112.0, 96.0, 96.0, 96.0])
    assert not trigger(fraction=0.3).should_reorder(scores)
    assert not trigger(fraction=0.2, share_change=0.15).should_reorder(scores)
    assert trigger(fraction=0.0, share_change=0.0).should_reorder(scores)


def test_the_first_order_is_always_made_and_a_change_is_measured_from_the_last_one() -> None:
    reorder_trigger = ReorderTrigger(equal_experts(4))
    assert reorder_trigger.should_reorder(REFERENCE)
    scores = REFERENCE.copy()
    reorder_trigger.ordered(scores)
    scores += [100, 0, 0, 0]  # the trigger keeps a copy
    assert reorder_trigger.should_reorder(scores)
    reorder_trigger.ordered(scores)
    assert not reorder_trigger.should_reorder(scores)


def test_an_expert_that_wakes_has_changed_and_one_that_sleeps_on_has_not() -> None:
    assert trigger(np.array([0.0, 0.0, 50.0, 50.0])).changed_fraction(np.array([1.0, 0.0, 50.0, 50.0])) == 0.25


def test_shares_are_those_of_a_layer() -> None:
    table = OperatorTable(
        [Operator(expert_name(layer, e), OperatorKind.EXPERT, StateBytes(1, 1, 1)) for layer in (0, 1) for e in (0, 1)]
        + [Operator(gate_name(0), OperatorKind.GATE, StateBytes(1, 1, 1))]
    )
    reorder_trigger = ReorderTrigger(table)
    reorder_trigger.ordered(np.array([10.0, 10.0, 0.0, 10.0, 10.0]))
    assert reorder_trigger.changed_fraction(np.array([10.0, 10.0, 0.0, 99.0, 99.0])) == 0.0
    assert reorder_trigger.changed_fraction(np.array([10.0, 10.0, 0.0, 10.0, 15.0])) == 0.5


def test_a_model_without_experts_never_reorders() -> None:
    table = OperatorTable([Operator("layers.0", OperatorKind.LAYER, StateBytes(1, 1, 1))])
    assert not ReorderTrigger(table).should_reorder(np.zeros(1))


def test_what_cannot_be_is_refused() -> None:
    for name, value in (("share_change", -0.1), ("fraction", 1.5), ("fraction", float("nan"))):
        with pytest.raises(ConfigError, match=rf"\b{name}\b.* {value}\b.*\b0\b"):
            ReorderThresholds(**{name: value})
    with pytest.raises(PopularityError, match=r"\bnan\b"):
        trigger().should_reorder(np.array([1.0, np.nan, 1.0, 1.0]))
