"""Ranks that a failure interrupts before, during or after a decision about windows agree on the same windows."""

from __future__ import annotations

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.schedule import Schedule
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.saving.stage_policy import Policy, _Summary, agree, chosen_policies
from moevement_core.strategies import SparseSchedule
from tests.unit.policy.tables import equal_experts

TABLES = [equal_experts(6), equal_experts(4)]
"""Operator tables of stages 0 and 1."""


def _schedule(table: OperatorTable, size: int, start: int, *, turned: bool = False) -> SparseSchedule:
    order = np.arange(len(table))[:: -1 if turned else 1]
    return SparseSchedule(table, order, impose_window(table, order, size, WindowKind.ALIGNED), start=start)


def _policy(window_start: int, *schedules: Schedule, settled: bool = True) -> Policy:
    scores = np.arange(float(len(schedules[0].table)))
    return Policy(window_start, schedules, (scores, scores), settled, None, 0, "job", None, True)


def _ids(policy: Policy) -> list[str]:
    return [schedule.id for schedule in policy.schedules]


def test_the_newest_of_a_stage_is_that_of_all_its_ranks() -> None:
    before = _policy(3, _schedule(TABLES[0], 3, 0))
    after = _policy(6, _schedule(TABLES[0], 3, 0), _schedule(TABLES[0], 3, 6, turned=True))
    other = _policy(6, _schedule(TABLES[1], 3, 0))
    for reports in ([(0, before), (0, after), (1, other)], [(1, other), (0, after), (0, before)]):
        agreed, is_own = agree(0, reports)
        assert (is_own, agreed.window_start, _ids(agreed)) == (True, 6, _ids(after))
        assert agree(1, reports)[0] is other


def test_a_stage_where_nobody_was_through_takes_over_windows_and_keeps_its_order() -> None:
    before = _policy(8, _schedule(TABLES[0], 4, 0), _schedule(TABLES[0], 4, 4, turned=True), settled=False)
    after = _policy(12, _schedule(TABLES[1], 4, 0), _schedule(TABLES[1], 2, 12))
    agreed, is_own = agree(0, [(0, before), (1, after)])
    assert is_own
    assert (agreed.window_start, agreed.settled) == (12, True)
    assert [(schedule.start, schedule.size) for schedule in agreed.schedules] == [(0, 4), (4, 4), (12, 2)]
    previous, current = before.schedules[-1], agreed.schedules[-1]
    assert isinstance(previous, SparseSchedule)
    assert isinstance(current, SparseSchedule)
    assert list(current.order) == list(previous.order)


def test_a_new_order_elsewhere_changes_no_windows_here() -> None:
    before = _policy(3, _schedule(TABLES[0], 3, 0))
    after = _policy(6, _schedule(TABLES[1], 3, 0), _schedule(TABLES[1], 3, 6, turned=True))
    agreed, _ = agree(0, [(0, before), (1, after)])
    assert (agreed.window_start, _ids(agreed)) == (6, _ids(before))


def test_a_stage_of_which_nobody_is_left_has_the_windows_of_the_others() -> None:
    known = _policy(6, _schedule(TABLES[1], 3, 0), _schedule(TABLES[1], 2, 6))
    agreed, is_own = agree(0, [(1, known)])
    assert (agreed, is_own) == (known, False)
    own = agreed.for_stage(_schedule(TABLES[0], 1, 0), "learned")
    assert [(schedule.start, schedule.size) for schedule in own.schedules] == [(0, 3), (6, 2)]
    assert own.schedules[0].table is TABLES[0]
    assert own.learned == "learned"


def test_only_policies_that_a_rank_lacks_are_sent() -> None:
    equal = [_Summary(rank % 2, 6, bytes([rank % 2, 1])) for rank in range(6)]
    assert chosen_policies(equal) == ({0: 0, 1: 1}, [])
    replaced = [_Summary(0), *equal[1:]]
    assert chosen_policies(replaced) == ({0: 2, 1: 1}, [2])
    behind = [*equal[:3], _Summary(1, 3, b"before"), *equal[4:]]
    assert chosen_policies(behind) == ({0: 0, 1: 1}, [1])
    stage_behind = [_Summary(rank % 2, 6 - 3 * (rank % 2), bytes([rank % 2, 1])) for rank in range(6)]
    assert chosen_policies(stage_behind) == ({0: 0, 1: 1}, [0])
    stage_lost = [summary if summary.stage == 0 else _Summary(1) for summary in equal]
    assert chosen_policies(stage_lost) == ({0: 0}, [0])
