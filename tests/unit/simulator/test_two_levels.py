"""Lost tokens of two-level checkpoints, by hand: one layer of four experts, two on each of two nodes."""

from __future__ import annotations

import numpy as np
import pytest

from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.simulator.two_levels import NodeFault, TwoLevels

STATE = StateBytes(compute=2, master=4, optimizer=8)
FIRST, SECOND, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})


def table(copies: int = 1) -> OperatorTable:
    rows = [
        [Operator(expert_name(0, expert), OperatorKind.EXPERT, STATE) for expert in (2 * rank, 2 * rank + 1)]
        for rank in (0, 1)
    ]
    return OperatorTable.of_ranks([OperatorTable(row) for row in rows * copies])


def training(experts: int = 2, persisted: int | None = 1, limit: float = 1.0) -> TwoLevels:
    """Return a training whose experts get ten tokens each between two checkpoints.

    With two experts in a snapshot and one on disk, snapshots hold experts 0 and 2, then 1 and 3, and so on; disk gets
    0, 1, 2, 3.
    """
    return TwoLevels(
        table(), (0, 1), np.full(4, 10), checkpoints=100, experts=experts, persisted=persisted, limit=limit
    )


@pytest.mark.parametrize(
    ("nodes", "lost"),
    [(FIRST, [30, 20, 10, 0]), (SECOND, [10, 0, 10, 0]), (BOTH, [30, 20, 10, 0]), (frozenset[int](), [10, 0, 10, 0])],
)
def test_experts_of_the_lost_node_come_from_disk_and_others_from_memory(nodes: frozenset[int], lost: list[int]) -> None:
    """Check the fourth checkpoint: disk has the experts of 30, 20, 10 and 0 tokens ago, memory of 10, 0, 10 and 0."""
    (restored,) = training().recoveries([NodeFault(3, nodes)])
    assert restored.lost.by_expert == {expert_name(0, place): count for place, count in enumerate(lost) if count}
    assert restored.lost.proportion == pytest.approx(sum(lost) / (100 * 40))
    assert restored.lost.proportion_so_far == pytest.approx(sum(lost) / (4 * 40))


def test_what_a_recovery_lost_is_not_lost_again() -> None:
    """Check both nodes at the fifth checkpoint: expert 0 is new on disk, and 1 to 3 were restored ten tokens ago."""
    first, second = training().recoveries([NodeFault(3, FIRST), NodeFault(4, BOTH)])
    assert first.lost.total == 60
    assert second.lost.by_expert == {expert_name(0, 1): 10, expert_name(0, 2): 10, expert_name(0, 3): 10}
    assert second.lost.proportion == pytest.approx((60 + 30) / (100 * 40))


def test_halves_of_an_expert_on_both_nodes_come_from_disk() -> None:
    shared = TwoLevels(table(copies=2), (0, 0, 1, 1), np.full(4, 10), checkpoints=100, experts=2, persisted=1)
    for nodes in (FIRST, SECOND):
        (restored,) = shared.recoveries([NodeFault(3, nodes)])
        assert restored.lost.total == 60


def test_all_experts_in_memory_lose_nothing_of_survivors() -> None:
    (restored,) = training(experts=4).recoveries([NodeFault(7, FIRST)])
    assert restored.lost.by_expert == {expert_name(0, 0): 30, expert_name(0, 1): 20}


def test_k_grows_with_the_lost_tokens_of_the_whole_run() -> None:
    """Check one expert in each snapshot: a failure loses 60 of 4,000 tokens, 1.5%; a limit of 2.5% has two steps."""
    faults = [NodeFault(number, BOTH) for number in (7, 27, 47)]
    grows, constant = (training(1, None, limit).recoveries(faults) for limit in (0.025, 1.0))
    assert [restored.lost.total for restored in constant] == [60, 60, 60]
    assert [restored.experts for restored in constant] == [1, 1, 1]
    assert [restored.experts for restored in grows] == [2, 2, 2]
    assert [restored.lost.total for restored in grows] == [60, 20, 20]
    assert training(1, None, 0.0125).recoveries(faults[:1])[0].experts == 4
