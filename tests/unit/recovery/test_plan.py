"""Plans use the newest run of snapshots that all ranks report, and fetch it from the quickest sources."""

from __future__ import annotations

import pytest

from moevement_core.errors import RecoveryError
from moevement_core.recovery.holdings import Fetch, Holding, Source
from moevement_core.recovery.plan import Report, plan_from_replicas, plan_recovery

WINDOW = {0: "2111", 1: "0211", 2: "0021", 3: "0002"}
"""Contents of each slot of an aligned window of four slots, with four operators."""


def held(owner: int, *iterations: int, source: Source = Source.MEMORY, schedule: str = "s") -> list[Holding]:
    return [Holding(owner, i, i, schedule, WINDOW[i % 4], source) for i in iterations]


def report(rank: int, *holdings: Holding, stage: int = 0) -> Report:
    return Report(rank, stage, tuple(holdings))


def test_the_newest_run_that_every_rank_has() -> None:
    plan = plan_recovery([report(0, *held(0, *range(12))), report(1, *held(1, *range(9)))], 11)
    assert (plan.first, plan.dense_at, plan.until) == (4, 7, 11)
    assert [fetch.iteration for fetch in plan.fetches if fetch.owner == 1] == [4, 5, 6, 7, 8]
    assert plan.runs[0].full_at.tolist() == [4, 5, 6, 7]


def test_own_memory_comes_first_then_peers_then_files_and_own_files_before_others() -> None:
    reports = [
        report(0, *held(0, 0, 1), *held(1, 0, 1, 2, 3, source=Source.PEER), *held(2, 0, source=Source.FILE)),
        report(1, *held(1, 0), *held(0, 0, 1, 2, source=Source.PEER), *held(2, 0, source=Source.FILE)),
        report(2, *held(2, 0, 1, 2, 3, source=Source.FILE), *held(0, 3, source=Source.FILE)),
    ]
    plan = plan_recovery(reports, 4)
    where = {(fetch.owner, fetch.iteration): (fetch.holder, fetch.source) for fetch in plan.fetches}
    assert where[0, 0] == (0, Source.MEMORY)
    assert where[0, 2] == (1, Source.PEER)
    assert where[0, 3] == (2, Source.FILE)
    assert where[1, 0] == (1, Source.MEMORY)
    assert where[1, 1] == (0, Source.PEER)
    assert where[2, 0] == (2, Source.FILE)
    assert {source: count for source, count in plan.sources().items() if count} == {
        Source.MEMORY: 3, Source.PEER: 4, Source.FILE: 5,
    }  # fmt: skip


def test_stages_begin_together() -> None:
    stages = [report(0, *held(0, *range(4, 12))), report(1, *held(1, *range(8)), stage=1)]
    plan = plan_recovery(stages, 12)
    assert (plan.first, plan.dense_at) == (4, 7)
    assert set(plan.runs) == {0, 1}


def test_snapshots_of_different_schedules_make_no_run() -> None:
    reports = [report(0, *held(0, *range(8))), report(1, *held(1, 0, 1, 2, 3), *held(1, 4, 5, 6, 7, schedule="other"))]
    assert plan_recovery(reports, 8).first == 0


def test_without_a_target_the_first_dense_state_is_it() -> None:
    assert plan_recovery([report(0, *held(0, *range(7)))], None).until == 3


@pytest.mark.parametrize(
    ("iterations", "listed"), [((1, 2, 3), r"1\b\D+\b3\b"), ((), r"none\b"), ((0, 1, 3), r"0\b\D+\b1\b\D+\b3\b")]
)
def test_no_way_back_is_said_with_what_there_is(iterations: tuple[int, ...], listed: str) -> None:
    with pytest.raises(RecoveryError, match=rf"\biteration 4\b.*\bstage 0\W+{listed}"):
        plan_recovery([report(0, *held(0, *iterations))], 4)


def test_snapshots_of_later_iterations_are_not_used() -> None:
    plan = plan_recovery([report(0, *held(0, *range(12)))], 6)
    assert (plan.first, plan.until) == (0, 6)
    assert max(fetch.iteration for fetch in plan.fetches) == 6
    assert Fetch(0, 6, 0, Source.MEMORY) in plan.fetches


def test_a_lost_rank_takes_state_from_the_first_that_has_it_live() -> None:
    reports = [Report(0, 0, ()), Report(1, 0, (), stands_for={0: 3, 2: 3}), Report(2, 0, ()), Report(3, 1, ())]
    plan = plan_from_replicas(reports, 17, {0, 2})
    assert plan is not None
    assert [(fetch.owner, fetch.holder, fetch.source, fetch.iteration) for fetch in plan.fetches] == [
        (0, 1, Source.REPLICA, 17), (2, 1, Source.REPLICA, 17),
    ]  # fmt: skip
    assert (list(plan.iterations), list(plan.redone), plan.ranks) == ([], [], {0, 2})
    assert plan.runs[0].full_at.tolist() == [17, 17, 17]
    assert plan_from_replicas(reports, 17, {0, 3}) is None, "nobody has what rank 3 had"
    assert plan_from_replicas(reports, 17, ()) is None
