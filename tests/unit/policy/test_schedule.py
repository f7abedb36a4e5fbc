"""Contents of a snapshot follow from its iteration, and windows stay whole through every change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.errors import ScheduleError
from moevement_core.operators import OperatorTable
from moevement_core.policy.schedule import Saved, ScheduleHistory, next_boundary
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.strategies import SparseSchedule
from tests.unit.policy.tables import equal_experts, orders, stages

KINDS = list(WindowKind)


def schedule(table: OperatorTable, size: int, kind: WindowKind, order: np.ndarray | None = None, start: int = 0):
    order = np.arange(len(table)) if order is None else order
    return SparseSchedule(table, order, impose_window(table, order, size, kind), start=start)


def test_figure_6() -> None:
    """Check six operators in three slots: E1 and E2, then E3 and E4, then the non-expert and the gate."""
    aligned = schedule(equal_experts(6), 3, WindowKind.ALIGNED, start=10)
    e1, e2, e3, e4, non_expert, gate = aligned.table.names
    assert [aligned.active(slot) for slot in range(3)] == [(e1, e2), (e3, e4), (non_expert, gate)]
    history = ScheduleHistory(aligned)
    for iteration, contents in enumerate([[2, 2, 1, 1, 1, 1], [0, 0, 2, 2, 1, 1], [0, 0, 0, 0, 2, 2]], start=10):
        np.testing.assert_array_equal(history.contents(iteration), contents)
        np.testing.assert_array_equal(history.contents(iteration + 3), contents)
    assert aligned.window.slot_bytes[0].tolist() == [2 * 12 + 4 * 2, 2 * 12 + 2 * 2, 2 * 12]
    rolling = schedule(equal_experts(6), 3, WindowKind.ROLLING, start=10)
    np.testing.assert_array_equal(rolling.contents_of_slot(1), [1, 1, 2, 2, 1, 1])


@given(
    data=st.data(),
    table=stages(),
    size=st.integers(1, 9),
    kind=st.sampled_from(KINDS),
    start=st.integers(0, 50),
    window=st.integers(0, 5),
)
def test_full_state_once_a_window_and_compute_weights_of_exactly_the_right_others(
    data: st.DataObject, table: OperatorTable, size: int, kind: WindowKind, start: int, window: int
) -> None:
    drawn = schedule(table, size, kind, data.draw(orders(table)), start)
    first = start + window * size
    taken = [ScheduleHistory(drawn).contents(first + slot) for slot in range(size)]
    contents = np.stack([saved for saved in taken if saved is not None])
    np.testing.assert_array_equal((contents == Saved.FULL).sum(axis=0), 1)
    full_at = (contents == Saved.FULL).argmax(axis=0)
    for slot in range(size):
        frozen = (full_at > slot) if kind is WindowKind.ALIGNED else (full_at != slot)
        np.testing.assert_array_equal(contents[slot] == Saved.COMPUTE, frozen)
        by_name = {n for n, saved in zip(table.names, contents[slot], strict=True) if saved == Saved.FULL}
        assert by_name == set(drawn.active(slot))
        weight = (contents[slot] == Saved.FULL) * table.full + (contents[slot] == Saved.COMPUTE) * table.compute
        np.testing.assert_array_equal(drawn.window.slot_bytes[:, slot], weight.sum(axis=1))


@given(size=st.integers(1, 9), start=st.integers(0, 30), iteration=st.integers(0, 60))
def test_boundaries_are_where_slot_0_is(size: int, start: int, iteration: int) -> None:
    aligned = schedule(equal_experts(9), size, WindowKind.ALIGNED, start=start)
    boundary = next_boundary(aligned, iteration)
    assert boundary >= iteration
    assert aligned.slot(boundary) == 0
    assert boundary - max(iteration, start) < size
    if iteration >= start:
        assert aligned.slot(iteration - aligned.slot(iteration)) == 0
        assert 0 <= aligned.slot(iteration) < size


def test_equal_schedules_share_an_id_and_others_do_not() -> None:
    def name(count: int = 4, size: int = 2, kind: WindowKind = WindowKind.ALIGNED, order: str = "0123", start: int = 0):
        return schedule(equal_experts(count), size, kind, np.array([int(place) for place in order]), start).id

    assert name() == name()
    others = [name(order="1023"), name(size=3), name(kind=WindowKind.ROLLING), name(start=2), name(5, order="01234")]
    assert len({name(), *others}) == 6


def test_a_change_begins_where_the_next_window_would() -> None:
    table = equal_experts(6)
    history = ScheduleHistory(schedule(table, 3, WindowKind.ALIGNED))
    backwards = np.arange(6)[::-1]
    changed = history.change(4, SparseSchedule(table, backwards, impose_window(table, backwards, 2)))
    assert changed.start == 6
    assert history.at(5).size == 3
    assert history.at(6) is changed
    np.testing.assert_array_equal(history.contents(5), [0, 0, 0, 0, 2, 2])
    np.testing.assert_array_equal(history.contents(6), [1, 1, 1, 2, 2, 2])
    again = history.change(
        5, SparseSchedule(table, np.arange(6), impose_window(table, np.arange(6), 3))
    )  # replaces the change at 6, which has not begun
    assert (again.start, history.at(6).size) == (6, 3)
    later = history.change(6, SparseSchedule(table, np.arange(6), impose_window(table, np.arange(6), 1)))
    assert (later.start, history.at(8).size, history.at(9).size) == (9, 3, 1)
    history.forget_before(8)
    assert history.at(8).size == 3
    with pytest.raises(ScheduleError, match=r"\biteration 5\b.*\b6\b"):
        history.at(5)


@given(
    data=st.data(),
    changes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.sampled_from(KINDS)), max_size=4),
)
def test_windows_stay_whole_through_changes(data: st.DataObject, changes: list[tuple[int, int, WindowKind]]) -> None:
    table = equal_experts(6)
    history = ScheduleHistory(schedule(table, 3, WindowKind.ALIGNED))
    for now, size, kind in sorted(changes):
        order = data.draw(orders(table))
        history.change(now, SparseSchedule(table, order, impose_window(table, order, size, kind)))
    iteration = 0
    while iteration < 60:
        begun = history.at(iteration)
        assert begun.slot(iteration) == 0
        for slot in range(begun.size):
            assert history.at(iteration + slot) is begun
        iteration += begun.size


def test_before_its_start_a_schedule_has_no_answer() -> None:
    with pytest.raises(ScheduleError, match=r"\biteration 3\b.*\b4\b"):
        schedule(equal_experts(2), 1, WindowKind.ALIGNED, start=4).slot(3)


def test_without_lag_the_expected_rollback_is_the_papers() -> None:
    for size in (1, 3, 6):
        aligned, rolling = (schedule(equal_experts(6), size, kind) for kind in KINDS)
        assert aligned.rollback(0).mean == 1.5 * size
        assert aligned.rollback(0).most < 2 * size
        assert rolling.rollback(2).most == size + 2
