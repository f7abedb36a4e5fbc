"""The simplest strategy saves the whole state at once, every k iterations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moevement_core.policy.schedule import Contents, Saved, Schedule, ScheduleHistory
from moevement_core.policy.window import WindowKind
from moevement_core.strategies import DenseSchedule, DenseToPeers, MoEvement
from tests.unit.policy.tables import equal_experts

TABLE = equal_experts(4)


def _held(schedule: Schedule, last: int) -> dict[int, Contents]:
    every = {iteration: ScheduleHistory(schedule).contents(iteration) for iteration in range(schedule.start, last + 1)}
    return {iteration: contents for iteration, contents in every.items() if contents is not None}


def test_everything_every_k_iterations_and_nothing_between() -> None:
    schedule = DenseToPeers(TABLE, 4).first(10, most=1)
    assert (schedule.start, schedule.size, schedule.snapshots, schedule.is_dense) == (10, 4, 1, True)
    held = _held(schedule, 30)
    assert list(held) == [10, 14, 18, 22, 26, 30]
    assert all((contents == Saved.FULL).all() for contents in held.values())
    assert [point.first for point in DenseToPeers(TABLE, 4).restore_points(held, 25)] == [22, 18, 14, 10]
    assert all(point.first == point.last for point in DenseToPeers(TABLE, 4).restore_points(held))


@pytest.mark.parametrize(("interval", "lag"), [(1, 0), (4, 0), (5, 2)])
def test_bounds_are_reached_and_the_mean_is_the_expected_one(interval: int, lag: int) -> None:
    strategy = DenseToPeers(TABLE, interval)
    schedule = strategy.first(0, most=1)
    replayed = [
        last - next(strategy.restore_points(_held(schedule, last - 1 - lag))).first
        for last in range(10 * interval, 11 * interval)
    ]
    assert max(replayed) == schedule.rollback(lag).most
    assert np.mean(replayed) + 0.5 == schedule.rollback(lag).mean


def test_another_stage_saves_in_the_same_iterations() -> None:
    first = DenseToPeers(TABLE, 4).first(0, most=1)
    shifted = replace(first, start=8)
    other = shifted.for_operators_of(DenseToPeers(equal_experts(6), 9).first(0, most=1))
    assert isinstance(other, DenseSchedule)
    assert (other.start, other.interval, len(other.table)) == (8, 4, 6)
    assert other.id != shifted.id


def test_it_has_nothing_to_learn_and_never_changes() -> None:
    strategy = DenseToPeers(TABLE, 4)
    now = strategy.first(0, most=1)
    proposal = strategy.propose(now, None)
    assert strategy.settled
    assert strategy.counts is None
    assert not proposal.is_change
    assert list(proposal.schedules) == [now]


def test_a_window_of_one_iteration_is_dense_every_iteration() -> None:
    sparse = MoEvement(TABLE, WindowKind.ALIGNED, 1).first(0, most=len(TABLE))
    dense = DenseToPeers(TABLE, 1).first(sparse.start, most=1)
    for iteration in range(sparse.start, 5):
        saved = ScheduleHistory(sparse).contents(iteration)
        np.testing.assert_array_equal(saved, ScheduleHistory(dense).contents(iteration))
    assert (sparse.is_dense, sparse.rollback(2).most) == (True, dense.rollback(2).most)
