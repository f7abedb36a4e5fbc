"""Re-executed updates restore the state bit for bit, from any snapshots that are left."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from moevement_core.policy.redo import redo_runs
from moevement_core.policy.runs import open_starts, restore_points
from moevement_core.policy.schedule import Contents, Saved, Schedule, ScheduleHistory
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.plan import RecoveryPlan, Report, plan_recovery, plan_redo
from moevement_core.recovery.replay import ReplayObserver, replay
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.strategies import RedoSchedule, SparseSchedule
from tests.unit.recovery.toy import OPERATORS, Toy, run_until

F, G, C = int(Saved.FULL), int(Saved.GRADIENT), int(Saved.COMPUTE)


def _toy(size: int) -> Toy:
    toy = Toy(size, WindowKind.ALIGNED)
    toy.history = ScheduleHistory(RedoSchedule.of(toy.history.newest.table, size, -size))
    return toy


def _holdings(snapshots: dict[int, Snapshot]) -> tuple[Holding, ...]:
    return tuple(
        Holding(0, iteration, snapshot.header.state, snapshot.header.schedule, snapshot.header.contents, Source.MEMORY)
        for iteration, snapshot in snapshots.items()
    )


def _restore(toy: Toy, snapshots: dict[int, Snapshot], until: int) -> tuple[RecoveryPlan, StateCheck]:
    plan = plan_recovery([Report(0, 0, _holdings(snapshots))], until)
    toy.wipe()
    toy.ran.clear()
    toy.redone.clear()
    check = StateCheck(toy.states(), toy.whole)
    replay(plan, 0, toy.names, {fetch.iteration: snapshots[fetch.iteration] for fetch in plan.fetches}, toy, check,
           ReplayObserver())  # fmt: skip
    return plan, check


@pytest.mark.parametrize("size", range(1, 8))
def test_the_newest_snapshot_is_reached_without_an_iteration(size: int) -> None:
    until = 2 * size + 3
    toy = _toy(size)
    snapshots = run_until(toy, until + 1, {})
    truth = snapshots[until].header.whole
    plan, check = _restore(toy, snapshots, until)
    assert toy.whole() == truth
    assert not check.differences
    assert not toy.ran
    assert [iteration for iteration, _ in toy.redone] == list(plan.redone)
    assert len(plan.redone) == size - 1
    counts = [count for _, count in toy.redone]
    assert counts == sorted(counts), "an operator is updated from its newest full state on"
    if size > 1:
        assert check.verified_until == until


@pytest.mark.parametrize("lag", range(4))
def test_what_has_no_gradients_yet_is_run_again(lag: int) -> None:
    toy, until = _toy(3), 9
    snapshots = run_until(toy, until, {})
    truth = toy.whole()
    for iteration in range(until - lag, until):
        del snapshots[iteration]
    plan, _ = _restore(toy, snapshots, until)
    assert toy.whole() == truth
    assert [iteration for iteration, _ in toy.ran] == list(plan.iterations) == list(range(until - lag, until + 1))


@pytest.mark.parametrize("seed", range(80))
def test_any_window_any_change_any_snapshots_left(seed: int) -> None:
    random = Random(seed)
    first, until = random.randint(1, 5), random.randint(1, 25)
    toy, twin = _toy(first), _toy(first)
    table, changes = toy.history.newest.table, dict[int, Schedule]()
    for iteration in range(1, until):
        if random.random() < 0.2:
            size = random.randint(1, 5)
            order = np.array(random.sample(range(OPERATORS), OPERATORS))
            rest = random.choice([0, 0, 3])
            window = impose_window(table, order, size, random.choice(list(WindowKind)))
            sparse = SparseSchedule(table, order, window, rest=rest)
            redo = RedoSchedule.of(table, size, rest=rest)
            changes[iteration] = random.choice([redo, redo, sparse])
    snapshots = run_until(toy, until + 1, changes)
    run_until(twin, until, changes)
    truth = twin.whole()
    for iteration in list(snapshots):
        if random.random() < 0.12:
            del snapshots[iteration]
    if next(restore_points({i: snapshot.contents for i, snapshot in snapshots.items()}, until), None) is None:
        return
    plan, check = _restore(toy, snapshots, until)
    assert toy.whole() == truth, (plan.first, plan.redone_until)
    assert not check.differences
    assert len(toy.ran) == len(plan.iterations)


def _by_hand(snapshots: dict[int, Contents], until: int) -> set[int]:
    """Return the iterations that re-executed updates reach, computed operator by operator."""
    reached = set()
    for last in (iteration for iteration in snapshots if iteration <= until):
        firsts = []
        for operator in range(len(snapshots[last])):
            at = last
            while at in snapshots and snapshots[at][operator] == G:
                at -= 1
            firsts.append(at if at in snapshots and snapshots[at][operator] == F else None)
        if None not in firsts and set(firsts) != {last}:
            reached.add(last)
    return reached


@pytest.mark.parametrize("seed", range(100))
def test_runs_are_those_that_can_be_found_by_hand(seed: int) -> None:
    random = Random(seed)
    snapshots = {
        iteration: np.array([random.choice([F, G, G, G, C][: random.choice([4, 5])]) for _ in range(3)], dtype=np.int8)
        for iteration in range(12)
        if random.random() < 0.9
    }
    until = random.randint(3, 11)
    runs = list(redo_runs(snapshots, until))
    assert {run.last for run in runs} == _by_hand(snapshots, until)
    assert [run.last for run in runs] == sorted((run.last for run in runs), reverse=True)
    for run in runs:
        assert run.first == min(run.full_at)
        assert all(snapshots[at][operator] == F for operator, at in enumerate(run.full_at))


def test_a_run_may_still_come_where_no_snapshot_was_left_out() -> None:
    snapshots = {i: np.array([F if i % 2 == place else G for place in range(2)], dtype=np.int8) for i in (1, 2, 4, 5)}
    assert sorted(set(open_starts(snapshots, is_gapless=True))) == [4, 5]


def test_only_who_lost_its_state_is_restored_and_only_if_its_gradients_lead_there() -> None:
    toy = _toy(3)
    snapshots = run_until(toy, 9, {})
    reports = [Report(0, 0, _holdings(snapshots)), Report(1, 0, ())]
    plan = plan_redo(reports, 8, [0])
    assert plan is not None
    assert plan.ranks == {0}
    assert (plan.first, plan.until, len(plan.iterations)) == (6, 8, 0)
    assert plan_redo(reports, 9, [0]) is None, "gradients end at 8"
    assert plan_redo(reports, 8, [1]) is None, "nobody has anything of it"
