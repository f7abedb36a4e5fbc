"""The slots of redo: as heavy on one rank as on another, and named by their order."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_a_slot_is_as_heavy_on_every_rank(ranks: int, size: int) -> None:
    slots = RedoSchedule.of(_whole_experts(ranks), size).window.slot_bytes
    assert (slots == slots[0, 0]).all(), slots


def test_another_order_has_another_name() -> None:
    schedule = RedoSchedule.of(_whole_experts(2), 2)
    assert schedule.id == replace(schedule).id
    assert schedule.id != replace(schedule, order=schedule.order[::-1]).id
