"""What a state can be restored from among snapshots that are there, whatever way they were taken."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from moevement_core.policy import recoverable
from moevement_core.policy.recoverable import RecoverableRun, recoverable_runs
from moevement_core.policy.redo import open_redo_starts, redo_runs
from moevement_core.policy.schedule import Contents


def restore_points(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
    """Every run of snapshots that gives a dense state, by replay or by redo; the one that begins last comes first.

    Args:
        snapshots: what each available snapshot holds, by iteration.
        until: the iteration that is to be recovered; snapshots of later ones are not used.

    Raises:
        ScheduleError: snapshots of different numbers of operators.
    """
    return heapq.merge(redo_runs(snapshots, until), recoverable_runs(snapshots, until), key=lambda run: -run.first)


def open_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Where such a run begins that is there or may still come with the snapshots that follow; some twice.

    The newest of ``snapshots`` must be the last one taken: no run reaches over one that was left out.
    """
    yield from recoverable.open_starts(snapshots)
    yield from open_redo_starts(snapshots)
