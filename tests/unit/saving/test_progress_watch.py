"""Warnings that nothing new is persisted, and that saving costs more than its cap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moevement_core.overhead.cap import RECENT, Evidence
from moevement_core.run.events import AboveCap
from moevement_core.saving.progress_watch import ProgressWatch


class Heard:
    """Recorder of the warnings that a watch reports."""

    is_recorded = False

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.costs: list[AboveCap] = []

    def warn(self, text: str, event: Any) -> None:
        if isinstance(event, AboveCap):
            self.costs.append(event)
        else:
            self.iterations.append(event.iterations)


def watch(heard: Heard, persisted: int | None) -> tuple[ProgressWatch, SimpleNamespace]:
    progress = SimpleNamespace(persisted=persisted, lag=0)
    checkpointer: Any = SimpleNamespace(progress=progress, history=SimpleNamespace(newest=SimpleNamespace(size=2)))
    reports: Any = heard
    return ProgressWatch(checkpointer, reports, 60.0, announced=None), progress


def test_a_rank_that_comes_late_counts_from_when_it_came() -> None:
    heard = Heard()
    new, _ = watch(heard, persisted=3)
    for committed in range(700, 706):
        new.look(committed, [])
    assert not heard.iterations
    assert new.longest_unpersisted == 5


def test_what_stays_away_is_said_the_longer_the_rarer_and_what_comes_begins_the_count_again() -> None:
    heard = Heard()
    watcher, progress = watch(heard, persisted=None)
    for committed in range(40):
        watcher.look(committed, [])
    first, *later = heard.iterations
    assert later == [first * 2, first * 4][: len(later)]
    assert later
    progress.persisted = 39
    heard.iterations.clear()
    for committed in range(40, 40 + first):
        watcher.look(committed, [])
    assert not heard.iterations


class Meter:
    """Meter that reports the cost of saving which the test sets."""

    def __init__(self) -> None:
        self.newest = Evidence(0.0, 0.0, 0)

    def evidence(self) -> Evidence:
        return self.newest


def test_a_cost_that_stays_above_the_cap_is_said_each_time_that_it_passes_it() -> None:
    heard, meter = Heard(), Meter()
    schedule = SimpleNamespace(size=10**9, snapshots=3)
    checkpointer: Any = SimpleNamespace(
        progress=SimpleNamespace(persisted=None, lag=0), history=SimpleNamespace(newest=schedule)
    )
    reports: Any = heard
    metered: Any = meter
    watcher = ProgressWatch(checkpointer, reports, 60.0, None, metered, cap=0.02)
    few, unsure, sure, below = (
        Evidence(0.5, 0.0, RECENT - 1), Evidence(0.05, 0.04, RECENT), Evidence(0.05, 0.01, RECENT),
        Evidence(0.01, 0.001, RECENT),
    )  # fmt: skip
    counts, committed = [], 0
    for meter.newest in (few, unsure, sure, below, sure):
        for _ in range(4 * RECENT):
            watcher.look(committed, [])
            committed += 1
        counts.append(len(heard.costs))
    assert counts == [0, 0, 1, 1, 2]
    for meter.newest in (below, sure):
        for committed in range(0, 4 * RECENT):
            watcher.look(committed, [], worth=0.045)
    assert len(heard.costs) == 2, "this cost is the right one while ranks fail often"
    assert (heard.costs[0].overhead, heard.costs[0].cap) == (0.05, 0.02)
