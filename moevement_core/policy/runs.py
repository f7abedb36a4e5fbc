"""Restore points among existing snapshots, whichever strategy captured them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from moevement_core.policy import recoverable
from moevement_core.policy.recoverable import RecoverableRun, recoverable_runs
from moevement_core.policy.redo import open_redo_starts, redo_runs
from moevement_core.policy.schedule import Contents
from moevement_core.policy.versions import leaves_out, open_version_starts, version_runs


def restore_points(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
    """Every run of snapshots that gives a dense state: by replay, by redo or by versions; the last to begin is first.

    Args:
        snapshots: what each available snapshot holds, by iteration.
        until: the iteration that is to be recovered; snapshots of later ones are not used.

    Raises:
        ScheduleError: snapshots of different numbers of operators.
    """
    kinds: list[Iterator[RecoverableRun]] = [redo_runs(snapshots, until), recoverable_runs(snapshots, until)]
    if any(leaves_out(saved) for saved in snapshots.values()):
        kinds.append(version_runs(snapshots, until))
    return heapq.merge(*kinds, key=lambda run: -run.first)


def open_starts(snapshots: Mapping[int, Contents], *, is_gapless: bool) -> Iterator[int]:
    """Yield the beginnings of restore points that exist or may be completed by coming snapshots; some twice.

    Args:
        snapshots: what each holds.
        is_gapless: whether the newest of them is the last one taken: by replay or redo no run reaches over a gap.
    """
    yield from open_version_starts(snapshots)
    if is_gapless:
        yield from recoverable.open_starts(snapshots)
        yield from open_redo_starts(snapshots)
