"""Restore points among existing snapshots, independent of the strategy that captured them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from moevement_core.policy import recoverable
from moevement_core.policy.recoverable import RecoverableRun, recoverable_runs
from moevement_core.policy.redo import open_redo_starts, redo_runs
from moevement_core.policy.schedule import Contents
from moevement_core.policy.versions import leaves_out, open_version_starts, version_runs


def restore_points(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
    """Yield every run of snapshots that restores a state: by replay, by redo, or with updates of some operators lost.

    The run with the newest first snapshot comes first.

    Args:
        snapshots: contents of each available snapshot, by iteration.
        until: iteration that is to be recovered; later snapshots are not used.

    Raises:
        ScheduleError: snapshots have different numbers of operators.
    """
    kinds: list[Iterator[RecoverableRun]] = [redo_runs(snapshots, until), recoverable_runs(snapshots, until)]
    if any(leaves_out(saved) for saved in snapshots.values()):
        kinds.append(version_runs(snapshots, until))
    return heapq.merge(*kinds, key=lambda run: -run.first)


def open_starts(snapshots: Mapping[int, Contents], *, is_gapless: bool) -> Iterator[int]:
    """Yield the first iteration of every restore point that is complete or that later snapshots may complete.

    An iteration comes more than once if several kinds of restore points may begin there.

    Args:
        snapshots: contents of each snapshot, by iteration.
        is_gapless: True if the newest of ``snapshots`` is the last one captured. Otherwise snapshots captured after it
            are missing. They leave a gap, which no run of replay or redo crosses, so the function leaves out such runs.
    """
    yield from open_version_starts(snapshots)
    if is_gapless:
        yield from recoverable.open_starts(snapshots)
        yield from open_redo_starts(snapshots)
