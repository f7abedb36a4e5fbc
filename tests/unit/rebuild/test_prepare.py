"""A recovery that is planned again uses the snapshots' current places, not those of the first plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moevement_core.comms.codec import Plain
from moevement_core.errors import RecoveryError
from moevement_core.rebuild import prepare as module
from moevement_core.recovery.holdings import Fetch, Holding, Source
from moevement_core.recovery.plan import RecoveryPlan, Report
from moevement_core.recovery.scope import Pipeline
from moevement_core.recovery.sources import SnapshotSource
from moevement_core.snapshot.snapshot import Snapshot


class Moving(SnapshotSource):
    """Source of a snapshot that its owner drops between two reports, because a peer has it now."""

    def __init__(self, *places: Source) -> None:
        self.places = list(places)

    def holdings(self) -> Sequence[Holding]:
        return [Holding(0, 1, 1, "schedule", "2", self.places[0])]

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        raise AssertionError("fetch is replaced")


def prepared(monkeypatch: pytest.MonkeyPatch, source: Moving, last: Source) -> module.Prepared:
    def fetch(rank: int, plan: RecoveryPlan, **_: Any) -> dict[int, Any]:
        planned: Fetch = plan.fetches[0]
        if len(source.places) > 1:
            source.places.pop(0)
        snapshot = object.__new__(Snapshot)
        return {1: snapshot if planned.source is last else planned}

    monkeypatch.setattr(module, "all_gather_objects", lambda local, kind: [local])
    monkeypatch.setattr(module, "fetch", fetch)
    return module.prepare(Report(0, 0, ()), {Source.MEMORY: source, Source.PEER: source}, 1, None)


def test_a_snapshot_that_a_peer_has_meanwhile_is_fetched_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reproduce seed 16 of the simulation: a rank dropped its copies between report and fetch, and the job was lost."""
    recovery = prepared(monkeypatch, Moving(Source.MEMORY, Source.PEER), Source.PEER)
    assert recovery.plans[0].fetches[0].source is Source.PEER


def test_what_was_damaged_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecoveryError, match=r"\biteration 1\b.*\bstage 0\b"):
        prepared(monkeypatch, Moving(Source.MEMORY), Source.PEER)


class Held(SnapshotSource):
    """Source with a dense snapshot of each of two ranks, after iteration 1."""

    def holdings(self) -> Sequence[Holding]:
        return [Holding(owner, 1, 1, "schedule", "2", Source.PEER) for owner in (0, 1)]

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        raise AssertionError("nothing is fetched")


@pytest.mark.parametrize("has_copy", [True, False])
def test_ranks_report_snapshots_of_other_stages_only_if_all_stages_roll_back(
    monkeypatch: pytest.MonkeyPatch, *, has_copy: bool
) -> None:
    """Check the reports of rank 1, whose stage keeps its state, after rank 0 and its stage were lost."""
    reported: list[Report] = []

    def gather(local: Report, kind: type) -> list[Report]:
        if not has_copy:
            local = replace(local, holdings=tuple(held for held in local.holdings if held.owner != 0))
        reported.append(local)
        return [Report(0, 0, ()), local]

    monkeypatch.setattr(module, "all_gather_objects", gather)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 1)
    scope = module.Scope(Pipeline(2, False, frozenset()), frozenset({0}), (), owners={0})
    report = Report(1, 1, (), logged=(2,), outcomes=(2,))

    def plan() -> tuple[RecoveryPlan, ...]:
        return module._reports_and_plans(
            report, {Source.PEER: Held()}, until=2, scope=scope, lost_ranks={0}, unavailable=(), may_redo=True
        )[1]

    if has_copy:
        assert [list(chosen.runs) for chosen in plan()] == [[0]]
    else:
        with pytest.raises(RecoveryError):
            plan()
    owners = [[held.owner for held in sent.holdings] for sent in reported]
    assert owners == ([[0]] if has_copy else [[], [1]])


def test_one_rank_of_a_replica_sends_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check outcomes of two replicas of two ranks; rank 3 and, for iteration 4, rank 2 are replacements."""
    known = [(3, 4), (3, 4), (3,), ()]
    reports = [Report(rank, rank // 2, (), outcomes=known[rank], replica=rank % 2) for rank in range(4)]
    senders = {0: {4: "from 0"}, 1: {3: "from 1", 4: "from 1"}, 2: {3: "from 2"}, 3: {}}
    expected = {0: {3: "from 2", 4: "from 0"}, 1: {3: "from 1", 4: "from 1"}}
    for rank, report in enumerate(reports):

        def gather(local: Plain, kind: type, rank: int = rank) -> list[Plain]:
            assert local.value == senders[rank]
            return [Plain(outcomes) for outcomes in senders.values()]

        monkeypatch.setattr(module, "all_gather_objects", gather)
        outcomes = dict.fromkeys(known[rank], f"from {rank}")
        assert module._share_outcomes(reports, report, outcomes) == expected[report.replica]
