"""Runs of snapshots that recover a state, found by their contents (MoEvement section 3.3; figure 8).

Consecutive snapshots ``SS_a ... SS_b`` are a recoverable run if every operator meets two conditions. One of the
snapshots has the operator's full state, and each earlier snapshot has the operator's compute weights. A recovery loads
``SS_a``, replays iteration a+1, loads ``SS_(a+1)``, and so on. An operator is frozen until its full state has been
loaded, and active from then on. Once ``SS_b`` is loaded, all operators are active. The search looks only at contents
and not at positions in a window, so a run may cross a reorder or a change of the window size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ScheduleError
from moevement_core.policy.schedule import Contents, Saved


@dataclass(frozen=True, eq=False)
class RecoverableRun:
    """Snapshots ``first`` to ``last``, which together hold a dense state."""

    first: int
    """Iteration of the first snapshot. A replay begins from the state of this iteration."""
    full_at: npt.NDArray[np.int64]
    """Iteration of the snapshot that each operator's full state is loaded from, int64 ``[operators]``."""

    @property
    def last(self) -> int:
        """Iteration of the last snapshot. After a recovery has loaded this snapshot, every operator has full state."""
        return int(self.full_at.max())

    @property
    def is_redone(self) -> bool:
        """True if a recovery up to ``last`` repeats updates from gradients instead of executing iterations again."""
        return False

    @property
    def is_stale(self) -> bool:
        """True if the restored state has some operators in an older version than others, so that updates are lost."""
        return False

    @property
    def version_at(self) -> npt.NDArray[np.int64]:
        """Iteration of the state to which each operator is restored, int64 ``[operators]``."""
        return np.full_like(self.full_at, self.last)

    def is_at(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that have their full state after the replay of ``iteration``.

        The mask is bool ``[operators]``.
        """
        return self.full_at <= iteration

    def active_in(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that are active while ``iteration`` is replayed, bool ``[operators]``.

        The others are frozen.
        """
        return self.full_at < iteration

    def loads(self, iteration: int) -> npt.NDArray[np.int8]:
        """Return the kind of state that each operator loads from ``SS_iteration`` before the next replayed iteration.

        The result is :class:`Saved` as int8 ``[operators]``. An operator loads full state when it becomes active,
        compute weights while it is frozen, and nothing once it is active.
        """
        loads = np.full(len(self.full_at), Saved.NOTHING, dtype=np.int8)
        loads[self.full_at > iteration] = Saved.COMPUTE
        loads[self.full_at == iteration] = Saved.FULL
        return loads


@dataclass(frozen=True, eq=False)
class NewestStateRun(RecoverableRun):
    """Snapshots ``first`` to ``last`` that restore a state without replay.

    A recovery loads each operator's newest full state. Subclasses say what the recovery does with operators whose full
    state is older than the restored iteration.
    """

    reaches: int
    """Iteration whose state the run restores."""

    @property
    def last(self) -> int:
        """Iteration whose state the run restores."""
        return self.reaches

    def loads(self, iteration: int) -> npt.NDArray[np.int8]:
        """Return the kind of state that each operator loads from ``SS_iteration``, int8 ``[operators]``.

        An operator loads full state if its newest full state is in this snapshot, and nothing otherwise.
        """
        return np.where(self.full_at == iteration, np.int8(Saved.FULL), np.int8(Saved.NOTHING))


def recoverable_runs(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
    """Yield every recoverable run, in descending order of the first snapshot.

    For each first snapshot, the function yields the shortest run that begins there.

    Args:
        snapshots: contents of each available snapshot, by iteration, without torn snapshots.
        until: iteration that is to be recovered; later snapshots are not used.

    Raises:
        ScheduleError: snapshots have different numbers of operators.
    """
    usable = {i: saved for i, saved in snapshots.items() if until is None or i <= until}
    for iteration, covered, full_at in _backwards(usable, beyond=False):
        if covered.all():
            yield RecoverableRun(iteration, full_at.copy())


def open_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Yield the first iteration of every run that is recoverable or that later snapshots may complete, newest first.

    The newest of ``snapshots`` must be the last one captured. If a later one was captured and is missing, it leaves a
    gap, and no run of snapshots crosses a gap.
    """
    for iteration, covered, _ in _backwards(snapshots, beyond=True):
        if covered.all():
            yield iteration


def _backwards(
    snapshots: Mapping[int, Contents], beyond: bool
) -> Iterator[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
    """Go through snapshots from the newest to the oldest, and yield the iteration and two arrays for each one.

    The first array is a mask of the operators that a run can restore if it begins with this snapshot: a snapshot of the
    run has the operator's full state, and each earlier one has its compute weights. The second array has, for each
    operator, the iteration of the oldest snapshot visited so far that holds its full state; -1 if none does.

    Args:
        snapshots: contents of each snapshot, by iteration.
        beyond: True if an operator's full state may come with a snapshot that is not captured yet.
    """
    if not snapshots:
        return
    newest = max(snapshots)
    operators = len(snapshots[newest])
    full_at = np.full(operators, -1, dtype=np.int64)
    covered = np.full(operators, beyond)
    expected = newest
    for iteration in sorted(snapshots, reverse=True):
        saved = snapshots[iteration]
        if len(saved) != operators:
            raise ScheduleError(
                f"snapshot {iteration} has {len(saved)} operators, but snapshot {newest} has {operators}; use only "
                "snapshots with the same operators together"
            )
        if iteration != expected:  # a snapshot is missing, and no run crosses a gap
            covered = np.zeros(operators, dtype=bool)
        full = saved == Saved.FULL
        covered = full | (covered & (saved == Saved.COMPUTE))
        full_at[full] = iteration
        yield iteration, covered, full_at
        expected = iteration - 1
