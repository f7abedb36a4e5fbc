"""Ranks that a failure interrupts before, in and after a decision about windows go on by one and the same."""

from __future__ import annotations

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.schedule import Schedule
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.saving.stage_policy import Policy, agree
from moevement_core.strategies import SparseSchedule
from tests.unit.policy.tables import equal_experts

TABLES = [equal_experts(6), equal_experts(4)]
"""Of stages 0 and 1."""


def _schedule(table: OperatorTable, size: int, start: int, *, turned: bool = False) -> SparseSchedule:
    order = np.arange(len(table))[:: -1 if turned else 1]
    return SparseSchedule(table, order, impose_window(table, order, size, WindowKind.ALIGNED), start=start)


def _policy(window_start: int, *schedules: Schedule, settled: bool = True) -> Policy:
    scores = np.arange(float(len(schedules[0].table)))
    return Policy(window_start, schedules, (scores, scores), settled, -1, 0, "job", (-1, -1), True)


def _ids(policy: Policy) -> list[str]:
    return [schedule.id for schedule in policy.schedules]


def test_the_newest_of_a_stage_is_that_of_all_its_ranks() -> None:
    before = _policy(3, _schedule(TABLES[0], 3, 0))
    after = _policy(6, _schedule(TABLES[0], 3, 0), _schedule(TABLES[0], 3, 6, turned=True))
    other = _policy(6, _schedule(TABLES[1], 3, 0))
    for told in ([(0, before), (0, after), (1, other)], [(1, other), (0, after), (0, before)]):
        agreed, is_own = agree(0, told)
        assert (is_own, agreed.window_start, _ids(agreed)) == (True, 6, _ids(after))
        assert agree(1, told)[0] is other


def test_a_stage_where_nobody_was_through_takes_over_windows_and_keeps_its_order() -> None:
    before = _policy(8, _schedule(TABLES[0], 4, 0), _schedule(TABLES[0], 4, 4, turned=True), settled=False)
    after = _policy(12, _schedule(TABLES[1], 4, 0), _schedule(TABLES[1], 2, 12))
    agreed, is_own = agree(0, [(0, before), (1, after)])
    assert is_own
    assert (agreed.window_start, agreed.settled) == (12, True)
    assert [(one.start, one.size) for one in agreed.schedules] == [(0, 4), (4, 4), (12, 2)]
    was, now = before.schedules[-1], agreed.schedules[-1]
    assert isinstance(was, SparseSchedule)
    assert isinstance(now, SparseSchedule)
    assert list(now.order) == list(was.order)


def test_a_new_order_elsewhere_changes_no_windows_here() -> None:
    before = _policy(3, _schedule(TABLES[0], 3, 0))
    after = _policy(6, _schedule(TABLES[1], 3, 0), _schedule(TABLES[1], 3, 6, turned=True))
    agreed, _ = agree(0, [(0, before), (1, after)])
    assert (agreed.window_start, _ids(agreed)) == (6, _ids(before))


def test_a_stage_of_which_nobody_is_left_has_the_windows_of_the_others() -> None:
    known = _policy(6, _schedule(TABLES[1], 3, 0), _schedule(TABLES[1], 2, 6))
    told, is_own = agree(0, [(1, known)])
    assert (told, is_own) == (known, False)
    own = told.for_stage(_schedule(TABLES[0], 1, 0), "learned")
    assert [(one.start, one.size) for one in own.schedules] == [(0, 3), (6, 2)]
    assert own.schedules[0].table is TABLES[0]
    assert own.learned == "learned"
