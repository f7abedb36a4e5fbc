"""Who sees that nothing new is persisted, and since when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moevement_core.session.progress_watch import ProgressWatch
from moevement_core.snapshot.agreement import NONE


class Heard:
    """What was warned of."""

    is_recorded = False

    def __init__(self) -> None:
        self.iterations: list[int] = []

    def warn(self, text: str, event: Any) -> None:
        self.iterations.append(event.iterations)


def watch(heard: Heard, persisted: int) -> tuple[ProgressWatch, SimpleNamespace]:
    progress = SimpleNamespace(persisted=persisted, lag=0)
    checkpointer: Any = SimpleNamespace(progress=progress, history=SimpleNamespace(newest=SimpleNamespace(size=2)))
    reports: Any = heard
    return ProgressWatch(checkpointer, reports, 60.0, announced=NONE), progress


def test_a_rank_that_comes_late_counts_from_when_it_came() -> None:
    heard = Heard()
    new, _ = watch(heard, persisted=3)
    for committed in range(700, 706):
        new.look(committed, [])
    assert not heard.iterations
    assert new.longest_unpersisted == 5


def test_what_stays_away_is_said_the_longer_the_rarer_and_what_comes_begins_the_count_again() -> None:
    heard = Heard()
    its, progress = watch(heard, persisted=NONE)
    for committed in range(40):
        its.look(committed, [])
    first, *later = heard.iterations
    assert later == [first * 2, first * 4][: len(later)]
    assert later
    progress.persisted = 39
    heard.iterations.clear()
    for committed in range(40, 40 + first):
        its.look(committed, [])
    assert not heard.iterations
