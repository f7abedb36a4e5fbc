"""A recovery that is planned again uses the snapshots' current places, not those of the first plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moevement_core.errors import RecoveryError
from moevement_core.rebuild import prepare as module
from moevement_core.recovery.holdings import Fetch, Holding, Source
from moevement_core.recovery.plan import RecoveryPlan, Report
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
