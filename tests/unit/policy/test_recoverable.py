"""Contents of snapshots determine the state that they restore, across every change of schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.errors import ScheduleError
from moevement_core.policy.recoverable import RecoverableRun, recoverable_runs
from moevement_core.policy.schedule import (
    Contents,
    Saved,
    ScheduleHistory,
)
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.strategies import SparseSchedule
from tests.unit.policy.tables import equal_experts, orders

KINDS = list(WindowKind)


def newest_recoverable_run(snapshots: dict[int, Contents], until: int | None = None) -> RecoverableRun | None:
    return next(recoverable_runs(snapshots, until), None)


def history_of(count: int, size: int, kind: WindowKind) -> ScheduleHistory:
    table = equal_experts(count)
    return ScheduleHistory(SparseSchedule(table, np.arange(count), impose_window(table, np.arange(count), size, kind)))


def taken(history: ScheduleHistory, last: int, first: int = 0) -> dict[int, Contents]:
    planned = {iteration: history.contents(iteration) for iteration in range(first, last + 1)}
    return {iteration: contents for iteration, contents in planned.items() if contents is not None}


def check_by_replaying(run: RecoverableRun, snapshots: dict[int, Contents]) -> None:
    """Load and replay as a recovery would; at every iteration each operator must have weights of that iteration."""
    operators = len(run.full_at)
    active = np.zeros(operators, dtype=bool)
    for iteration in range(run.first, run.last + 1):
        loads = run.loads(iteration)
        assert (snapshots[iteration] >= loads).all(), "nothing is loaded that the snapshot does not hold"
        has_weights = active | (loads == Saved.COMPUTE) | (loads == Saved.FULL)
        assert has_weights.all(), f"replaying {iteration + 1}: an operator has neither full state nor compute weights"
        assert not (active & (loads != Saved.NOTHING)).any(), "an active operator is not loaded again"
        active |= loads == Saved.FULL
        np.testing.assert_array_equal(run.active_in(iteration + 1), active)
    assert active.all(), "the state is dense at the end"


@given(
    count=st.integers(1, 8), size=st.integers(1, 9), kind=st.sampled_from(KINDS), last=st.integers(0, 40),
    lag=st.integers(0, 6),
)  # fmt: skip
def test_rollback_keeps_to_its_bounds(count: int, size: int, kind: WindowKind, last: int, lag: int) -> None:
    newest = last - 1 - lag
    history = history_of(count, size, kind)
    schedule, snapshots = history.newest, taken(history, newest)
    run = newest_recoverable_run(snapshots)
    if run is None:
        assert newest + 1 < (2 * size if kind is WindowKind.ALIGNED else size)
        return
    check_by_replaying(run, snapshots)
    replayed = last - run.first
    assert replayed <= schedule.rollback(lag).most <= (size if kind is WindowKind.ROLLING else 2 * size) + lag


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "lag"), [(1, 0), (4, 0), (5, 2)])
def test_bounds_are_reached_and_the_mean_is_the_expected_one(kind: WindowKind, size: int, lag: int) -> None:
    history = history_of(10, size, kind)
    schedule, replayed = history.newest, []
    for last in range(10 * size, 11 * size):
        run = newest_recoverable_run(taken(history, last - 1 - lag))
        assert run is not None
        replayed.append(last - run.first)
    assert max(replayed) == schedule.rollback(lag).most
    assert np.mean(replayed) + 0.5 == schedule.rollback(lag).mean


@given(
    data=st.data(),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    last=st.integers(0, 60),
    missing=st.sets(st.integers(0, 60), max_size=3),
)
def test_across_reorders_new_windows_and_gaps_the_newest_run_is_found_and_recovers(
    data: st.DataObject, kinds: list[WindowKind], last: int, missing: set[int]
) -> None:
    history = history_of(6, 3, kinds[0])
    table = history.newest.table
    for change, kind in enumerate(kinds[1:]):
        order = data.draw(orders(table))
        window = impose_window(table, order, data.draw(st.integers(1, 5)), kind)
        history.change(10 * change + 7, SparseSchedule(table, order, window))
    snapshots = {i: contents for i, contents in taken(history, last).items() if i not in missing}
    run = newest_recoverable_run(snapshots)
    begins = [first for first in snapshots if _recovers_from(first, snapshots)]
    assert (run.first if run else None) == max(begins, default=None)
    if run:
        check_by_replaying(run, snapshots)


def _recovers_from(first: int, snapshots: dict[int, Contents]) -> bool:
    """Return True if all operators become active when snapshots from ``first`` on are loaded one after the other."""
    active = np.zeros(len(snapshots[first]), dtype=bool)
    iteration = first
    while not active.all():
        saved = snapshots.get(iteration)
        if saved is None or not (active | (saved != Saved.NOTHING)).all():
            return False
        active |= saved == Saved.FULL
        iteration += 1
    return True


def test_right_after_a_reorder_a_rolling_window_reaches_further_back() -> None:
    history = history_of(3, 3, WindowKind.ROLLING)
    table = history.newest.table
    order = np.array([2, 1, 0])
    history.change(3, SparseSchedule(table, order, impose_window(table, order, 3, WindowKind.ROLLING)))
    run = newest_recoverable_run(taken(history, 7))  # 6 and 7 saved operators 2 and 1; operator 0 was last saved at 3
    assert run is not None
    assert (run.first, run.last, list(run.full_at)) == (3, 5, [3, 4, 5])


def test_an_aligned_window_that_is_torn_falls_back_to_the_one_before() -> None:
    history = history_of(3, 3, WindowKind.ALIGNED)
    snapshots = taken(history, 8)
    del snapshots[7]
    run = newest_recoverable_run(snapshots)
    assert run is not None
    assert (run.first, run.last) == (3, 5)
    assert newest_recoverable_run(snapshots, until=4) is not None
    assert newest_recoverable_run(snapshots, until=4).first == 0  # type: ignore[union-attr]
    assert newest_recoverable_run(snapshots, until=1) is None
    assert newest_recoverable_run({}) is None


def test_snapshots_of_other_tables_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"\bsnapshot 0\b.*\b2 operators\b.*\bsnapshot 1\b.*\b3\b"):
        newest_recoverable_run({0: np.ones(2, dtype=np.int8), 1: np.ones(3, dtype=np.int8)})
