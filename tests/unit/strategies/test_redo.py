"""The slots of redo: in one order, and named by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.strategies import RedoSchedule

LAYERS = 4


def _whole_experts(ranks: int, experts: int) -> OperatorTable:
    """Each rank has experts whose numbers follow each other, and no other one has them."""
    state, each = StateBytes(2, 4, 8, gradient=4), experts // ranks
    return OperatorTable(
        ranks=[
            [
                Operator(expert_name(layer, rank * each + one), OperatorKind.EXPERT, state)
                for layer in range(LAYERS)
                for one in range(each)
            ]
            for rank in range(ranks)
        ]
    )


def test_the_order_is_the_same_for_any_number_of_ranks() -> None:
    """So that a run goes on across a change of the job's size."""
    orders = [RedoSchedule.of(_whole_experts(ranks, 12), 2).order.tolist() for ranks in (2, 3, 12)]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == list(range(12 * LAYERS))


@pytest.mark.parametrize("size", [4, 8, 16, 32])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_ranks_have_as_much_in_every_slot(ranks: int, size: int) -> None:
    table = _whole_experts(ranks, 64)
    schedule = RedoSchedule.of(table, size)
    gradients = table.with_gradients_for_compute()
    peak = max(
        int(np.where(schedule.slot_of_operator == slot, gradients.full, gradients.compute).sum(axis=1).max())
        for slot in range(size)
    )
    operators = LAYERS * 64 // ranks
    state = StateBytes(2, 4, 8, gradient=4)
    fewest = -(-operators // size)
    assert peak <= (fewest + 1) * state.full + (operators - fewest - 1) * state.gradient


def test_another_order_has_another_name() -> None:
    schedule = RedoSchedule.of(_whole_experts(2, 8), 2)
    assert schedule.id == replace(schedule).id
    assert schedule.id != replace(schedule, order=schedule.order[::-1]).id
