"""Runs of snapshots that restore a state by repeating updates, found by their contents.

Each snapshot ``SS_t`` holds gradients of every operator whose full state it does not hold: those of the update to
``state@t``. Consecutive snapshots ``SS_a ... SS_c`` restore ``state@c`` under two conditions for every operator. Its
full state is in one of them, and its gradients are in each one after that. A recovery loads the newest full state and
repeats the updates since then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ScheduleError
from moevement_core.policy.recoverable import NewestStateRun
from moevement_core.policy.schedule import Contents, Saved


class RedoRun(NewestStateRun):
    """Snapshots ``first`` to ``last``, from which ``state@last`` follows by updates alone."""

    @property
    def is_redone(self) -> bool:
        """True, because updates are repeated and no iteration is executed again."""
        return True


def redo_runs(
    snapshots: Mapping[int, Contents], until: int | None = None, *, with_dense: bool = False
) -> Iterator[RedoRun]:
    """Yield every run that restores a state by updates, the farthest first, each as short as can be.

    Args:
        snapshots: contents of each available snapshot, by iteration.
        until: last iteration of a run; later snapshots are not used.
        with_dense: True if a snapshot counts, too, that is dense by itself and needs no update.

    Raises:
        ScheduleError: snapshots have different numbers of operators.
    """
    for last in sorted((iteration for iteration in snapshots if until is None or iteration <= until), reverse=True):
        full_at = _newest_full_state(snapshots, last)
        if full_at is not None and (with_dense or (full_at < last).any()):
            yield RedoRun(int(full_at.min()), full_at, last)


def open_redo_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Yield the first iterations of runs that exist, or may be completed by coming snapshots, the newest first.

    The newest of ``snapshots`` must be the last one taken.
    """
    expected = max(snapshots, default=0)
    for iteration in sorted(snapshots, reverse=True):
        if iteration != expected or not _has_gradients(snapshots[iteration]):
            return
        yield iteration
        expected = iteration - 1


def _has_gradients(saved: Contents) -> bool:
    return bool(((saved == Saved.GRADIENT) | (saved == Saved.FULL)).all())


def _newest_full_state(snapshots: Mapping[int, Contents], last: int) -> npt.NDArray[np.int64] | None:
    """Return the iteration of each operator's full state for reaching ``state@last``; None if an operator lacks one."""
    operators = len(snapshots[last])
    full_at = np.full(operators, -1, dtype=np.int64)
    is_open = np.ones(operators, dtype=bool)
    iteration = last
    while is_open.any():
        saved = snapshots.get(iteration)
        if saved is None:
            return None
        if len(saved) != operators:
            raise ScheduleError(
                f"snapshot {iteration} is of {len(saved)} operators, snapshot {last} of {operators}; snapshots of "
                "different tables cannot be used together"
            )
        newly_full = is_open & (saved == Saved.FULL)
        full_at[newly_full] = iteration
        is_open &= ~newly_full
        if (is_open & (saved != Saved.GRADIENT)).any():
            return None
        iteration -= 1
    return full_at
