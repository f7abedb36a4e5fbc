"""The slots of redo: in one order, and named by it."""

from __future__ import annotations

from dataclasses import replace

from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.strategies import RedoSchedule

EXPERTS = 4
"""Of a rank, which no other one has."""


def _whole_experts(ranks: int) -> OperatorTable:
    state = StateBytes(2, 4, 8, gradient=4)
    return OperatorTable(
        ranks=[
            [Operator(expert_name(0, rank * EXPERTS + one), OperatorKind.EXPERT, state) for one in range(EXPERTS)]
            for rank in range(ranks)
        ]
    )


def test_the_order_is_the_same_for_any_number_of_ranks() -> None:
    """So that a run goes on across a change of the job's size."""
    orders = [RedoSchedule.of(_whole_experts(ranks), 2).order[: 2 * EXPERTS].tolist() for ranks in (2, 3)]
    assert orders[0] == orders[1]


def test_another_order_has_another_name() -> None:
    schedule = RedoSchedule.of(_whole_experts(2), 2)
    assert schedule.id == replace(schedule).id
    assert schedule.id != replace(schedule, order=schedule.order[::-1]).id
