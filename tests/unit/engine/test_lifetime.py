"""Statuses of recoverable runs, and snapshots that a rank may free, without threads, buffers and processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from moevement_core.engine.lifetime import Lifetime, RunSpan, Unneeded
from moevement_core.policy.schedule import Contents, ScheduleHistory
from moevement_core.policy.window import WindowKind
from moevement_core.snapshot.agreement import HORIZON, Agreed, RunStatus
from moevement_core.strategies import DenseToPeers, MoEvement, Strategy
from tests.unit.policy.tables import equal_experts

TABLE = equal_experts(6)
OPEN, PERSISTED, NEVER = RunStatus.OPEN, RunStatus.PERSISTED, RunStatus.NEVER
STRATEGIES: dict[str, Strategy] = {
    "aligned": MoEvement(TABLE, WindowKind.ALIGNED, 3),
    "rolling": MoEvement(TABLE, WindowKind.ROLLING, 3),
    "dense": DenseToPeers(TABLE, 4),
}
# Snapshots that the strategies take from iteration 0 on.
HISTORIES = {
    name: ScheduleHistory(replace(strategy.first(0, len(TABLE)), start=0)) for name, strategy in STRATEGIES.items()
}  # fmt: skip


def held(name: str, iterations: Collection[int]) -> dict[int, Contents]:
    planned = {iteration: HISTORIES[name].contents(iteration) for iteration in iterations}
    return {iteration: contents for iteration, contents in planned.items() if contents is not None}


@pytest.mark.parametrize(
    ("name", "captured", "acknowledged", "statuses"),
    [
        ("aligned", range(0), range(0), {}),
        ("aligned", range(1), range(0), {0: OPEN}),
        ("aligned", range(3), range(3), {0: PERSISTED}),
        ("aligned", range(5), range(3), {0: PERSISTED, 3: OPEN}),
        ("aligned", range(6), range(3), {0: PERSISTED, 3: OPEN}),
        ("aligned", range(6), range(6), {0: PERSISTED, 3: PERSISTED}),
        ("rolling", range(4), range(3), {0: PERSISTED, 1: OPEN, 2: OPEN, 3: OPEN}),
        ("rolling", range(4), range(4), {0: PERSISTED, 1: PERSISTED, 2: OPEN, 3: OPEN}),
        ("dense", range(1), range(0), {0: OPEN}),
        ("dense", range(7), range(4), {0: PERSISTED, 4: OPEN}),
        ("dense", range(7), range(7), {0: PERSISTED, 4: PERSISTED}),
    ],
)
def test_how_far_runs_are(name: str, captured: Any, acknowledged: Any, statuses: Mapping[int, RunStatus]) -> None:
    lifetime = Lifetime(STRATEGIES[name])
    reported = lifetime.statuses(len(captured), held(name, captured), held(name, acknowledged))
    assert {first: status for first, status in reported.items() if status is not NEVER} == statuses


def test_no_run_reaches_over_a_snapshot_that_a_peer_will_never_have() -> None:
    lifetime = Lifetime(STRATEGIES["aligned"])
    assert lifetime.statuses(5, held("aligned", [0, 1, 2, 4]), held("aligned", [0, 1, 2])) == {0: PERSISTED}
    assert lifetime.statuses(6, held("aligned", [0, 1, 2, 3]), held("aligned", [0, 1, 2])) == {0: PERSISTED}, (
        "SS_5 was not taken"
    )


@pytest.mark.parametrize(
    ("statuses", "captured", "expected"),
    [
        ({0: OPEN}, range(3), Unneeded([], [], [])),
        ({0: PERSISTED, 3: OPEN}, range(6), Unneeded([], [], [])),
        ({0: PERSISTED, 3: PERSISTED, 6: OPEN}, range(8), Unneeded([0, 1, 2], [], [])),
        # A rank abandoned the window that began with 3, and the next run that the job may persist begins with 6.
        ({0: PERSISTED, 6: OPEN}, range(8), Unneeded([], [3, 4, 5], [])),
        # The statuses are of iteration 8, so they say nothing of runs that begin with 8 or later.
        ({0: PERSISTED}, range(9), Unneeded([], [3, 4, 5, 6, 7], [])),
    ],
)
def test_what_may_go(statuses: Mapping[int, RunStatus], captured: range, expected: Unneeded) -> None:
    lifetime = Lifetime(STRATEGIES["aligned"])
    lifetime.statuses(len(captured), held("aligned", captured), held("aligned", captured))
    assert lifetime.learn(Agreed(8, statuses), captured) == expected


def test_the_run_to_fall_back_to_stays_until_there_is_a_newer_one_on_all_ranks() -> None:
    lifetime = Lifetime(STRATEGIES["aligned"], persisted=RunSpan(0, 2))
    lifetime.statuses(6, held("aligned", range(6)), held("aligned", range(6)))
    assert lifetime.learn(Agreed(5, {0: PERSISTED, 3: OPEN}), range(6)) == Unneeded([], [], [])
    assert lifetime.persisted == (0, 2)
    assert lifetime.learn(Agreed(6, {0: PERSISTED, 3: PERSISTED}), range(6)).old == [0, 1, 2]
    assert lifetime.persisted == (3, 5)
    assert lifetime.learn(Agreed(7, {}), range(3, 7)).old == [], "a rank that joins knows of no run yet"
    assert lifetime.persisted == (3, 5)


def test_a_rank_that_a_failure_kept_from_learning_keeps_the_run_to_which_the_others_go_back() -> None:
    lifetime = Lifetime(STRATEGIES["aligned"], persisted=RunSpan(0, 2))
    lifetime.statuses(6, held("aligned", range(6)), held("aligned", range(6)))
    lifetime.catch_up(3)
    assert lifetime.persisted == (3, 5)
    assert lifetime.learn(Agreed(7, {6: OPEN}), range(7)) == Unneeded([0, 1, 2], [], [])
    lifetime.catch_up(0)
    assert lifetime.persisted == (3, 5)


def test_a_rank_does_not_catch_up_with_a_run_that_it_has_not_reported() -> None:
    lifetime = Lifetime(STRATEGIES["aligned"], persisted=RunSpan(0, 2))
    lifetime.statuses(6, held("aligned", range(6)), held("aligned", range(3)))
    lifetime.catch_up(3)
    assert lifetime.persisted == (0, 2)


def test_the_run_that_a_recovery_has_loaded_stays_although_it_is_never_persisted() -> None:
    lifetime = Lifetime(STRATEGIES["aligned"])
    lifetime.restored(3, 5)
    lifetime.statuses(10, held("aligned", range(10)), held("aligned", range(0)))
    freed = lifetime.learn(Agreed(9, {9: OPEN}), range(10))
    assert freed == Unneeded([], [0, 1, 2, 6, 7, 8], [3, 4, 5])
    assert freed.lost_ranges == [(0, 2), (6, 8)]
    assert 5 not in lifetime.under_way(held("aligned", [3, 4, 5, 9]), peers_are_full=True)
    assert lifetime.fallback == (3, 5)
    lifetime.statuses(12, held("aligned", range(3, 12)), held("aligned", range(9, 12)))
    assert lifetime.learn(Agreed(12, {9: PERSISTED}), [3, 4, 5, 9, 10, 11]).old == [3, 4, 5]
    assert lifetime.fallback == (9, 11)


def test_a_run_that_a_recovery_has_loaded_may_go_where_another_run_is_persisted() -> None:
    lifetime = Lifetime(STRATEGIES["aligned"], persisted=RunSpan(0, 2))
    lifetime.restored(3, 5)
    lifetime.statuses(10, held("aligned", range(10)), held("aligned", range(3)))
    assert lifetime.learn(Agreed(9, {0: PERSISTED, 9: OPEN}), range(10)) == Unneeded([], [3, 4, 5, 6, 7, 8], [])


@pytest.mark.parametrize(
    ("name", "acknowledged", "captured", "given_up"),
    [
        ("aligned", range(3), range(5), [3, 4]),
        ("aligned", range(3), range(6), []),  # the window is complete, and peers only have to get it
        ("aligned", range(0), range(2), [0, 1]),
        ("rolling", range(3), range(5), []),
        ("dense", range(1), range(5), []),
    ],
)
def test_only_the_window_under_way_is_given_up(
    name: str, acknowledged: Any, captured: Any, given_up: list[int]
) -> None:
    lifetime = Lifetime(STRATEGIES[name])
    lifetime.statuses(len(captured), held(name, captured), held(name, acknowledged))
    assert lifetime.under_way(held(name, captured)) == given_up


def test_nothing_is_persisted_before_all_ranks_have_said_so() -> None:
    lifetime = Lifetime(STRATEGIES["dense"])
    assert lifetime.persisted is None


@pytest.mark.parametrize(
    ("statuses", "persisted", "useless"),
    [
        ({0: PERSISTED, 3: OPEN}, (0, 2), []),
        # No rank can use the window that began with 3: a rank has moved to a process that never had its snapshots.
        ({0: PERSISTED, 6: OPEN}, (0, 2), [(3, 5)]),
        # A replacement knows of no run yet.
        ({}, (0, 2), [(3, 7)]),
        ({6: OPEN}, None, [(6 - HORIZON, 5)]),
    ],
)
def test_copies_that_no_rank_can_use_may_go(
    statuses: Mapping[int, RunStatus], persisted: tuple[int, int] | None, useless: list[tuple[int, int]]
) -> None:
    lifetime = Lifetime(STRATEGIES["aligned"], persisted=None if persisted is None else RunSpan(*persisted))
    lifetime.learn(agreed := Agreed(8, statuses), ())
    assert lifetime.useless_copies(agreed, None if persisted is None else persisted[1]) == useless


def test_copies_of_a_longer_run_and_of_a_run_that_was_loaded_stay() -> None:
    lifetime = Lifetime(STRATEGIES["aligned"], persisted=RunSpan(0, 2))
    lifetime.learn(agreed := Agreed(8, {6: OPEN}), ())
    assert lifetime.useless_copies(agreed, 4) == [(5, 5)], "the run has five snapshots on another stage"
    lifetime.nothing_is_persisted()
    lifetime.restored(1, 2)
    assert lifetime.useless_copies(agreed, None) == [(6 - HORIZON, 0), (3, 5)]
