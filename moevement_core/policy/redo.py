"""Runs of snapshots that restore a state by repeating updates, found by their contents.

Each snapshot ``SS_t`` holds the full state of some operators. For every other operator it holds the gradients of the
update that led to ``state@t``. Consecutive snapshots ``SS_a ... SS_c`` restore ``state@c`` if every operator meets two
conditions. One of the snapshots has the operator's full state, and each later snapshot has the operator's gradients. A
recovery loads the newest full state of each operator and repeats the operator's later updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ScheduleError
from moevement_core.policy.recoverable import NewestStateRun
from moevement_core.policy.schedule import Contents, Saved


class RedoRun(NewestStateRun):
    """Snapshots ``first`` to ``last`` that restore ``state@last`` by updates alone."""

    @property
    def is_redone(self) -> bool:
        """True, because updates are repeated and no iteration is executed again."""
        return True


def redo_runs(
    snapshots: Mapping[int, Contents], until: int | None = None, *, with_dense: bool = False
) -> Iterator[RedoRun]:
    """Yield every run that restores a state by updates, the run with the newest state first.

    For each restored state, the function yields the shortest run.

    Args:
        snapshots: contents of each available snapshot, by iteration.
        until: last iteration of a run; later snapshots are not used.
        with_dense: True to also yield runs of a single dense snapshot, which need no update.

    Raises:
        ScheduleError: snapshots have different numbers of operators.
    """
    for last in sorted((iteration for iteration in snapshots if until is None or iteration <= until), reverse=True):
        full_at = _newest_full_state(snapshots, last)
        if full_at is not None and (with_dense or (full_at < last).any()):
            yield RedoRun(int(full_at.min()), full_at, last)


def open_redo_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Yield the first iteration of every run that is complete or that later snapshots may complete, newest first.

    The newest of ``snapshots`` must be the last one captured. If a later one was captured and is missing, it leaves a
    gap, and no run of snapshots crosses a gap.
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
    """Return for each operator the iteration of the full state from which logged gradients lead to ``state@last``.

    Returns:
        int64 ``[operators]``; None if an operator has no such full state, or a gradient after it is missing.
    """
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
                f"snapshot {iteration} has {len(saved)} operators, but snapshot {last} has {operators}; use only "
                "snapshots with the same operators together"
            )
        newly_full = is_open & (saved == Saved.FULL)
        full_at[newly_full] = iteration
        is_open &= ~newly_full
        if (is_open & (saved != Saved.GRADIENT)).any():
            return None
        iteration -= 1
    return full_at
