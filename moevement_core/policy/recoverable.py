"""Runs of snapshots that recover a state, found by their contents (MoEvement section 3.3; figure 8).

Consecutive snapshots ``SS_a ... SS_b`` are a recoverable run under two conditions for every operator. Its full state is
in one of them, and its compute weights are in each one before that. A recovery loads ``SS_a``, replays iteration a+1,
loads ``SS_(a+1)``, and so on. An operator is frozen until its full state has been loaded, and active from then on; with
``SS_b`` all operators are active. Nothing is inferred from indices, so a run may reach across a reorder or a new window
size.
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
    """a, the iteration from whose state replay begins."""
    full_at: npt.NDArray[np.int64]
    """Iteration of the snapshot that each operator's full state is loaded from, int64 ``[operators]``."""

    @property
    def last(self) -> int:
        """b, the first iteration at which every operator is active, so that the state is dense."""
        return int(self.full_at.max())

    @property
    def is_redone(self) -> bool:
        """True if updates up to ``last`` are repeated from gradients, and no iteration is executed again."""
        return False

    @property
    def is_stale(self) -> bool:
        """True if some operators are older than others in the restored state, so that updates of them are lost."""
        return False

    @property
    def version_at(self) -> npt.NDArray[np.int64]:
        """Iteration of the newest state of each operator that is restored, int64 ``[operators]``."""
        return np.full_like(self.full_at, self.last)

    def is_at(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of operators that have the state of ``iteration`` once it is replayed, bool ``[operators]``."""
        return self.full_at <= iteration

    def active_in(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that are active while ``iteration`` is replayed, bool ``[operators]``.

        The others are frozen.
        """
        return self.full_at < iteration

    def loads(self, iteration: int) -> npt.NDArray[np.int8]:
        """Return what each operator loads from ``SS_iteration`` before the next iteration is replayed.

        The result is int8 ``[operators]``: full state if the operator becomes active, compute weights while it is
        frozen, and nothing once it is active.
        """
        loads = np.full(len(self.full_at), Saved.NOTHING, dtype=np.int8)
        loads[self.full_at > iteration] = Saved.COMPUTE
        loads[self.full_at == iteration] = Saved.FULL
        return loads


@dataclass(frozen=True, eq=False)
class NewestStateRun(RecoverableRun):
    """Snapshots ``first`` to ``last``, from which each operator's newest full state is loaded; nothing is replayed."""

    reaches: int
    """c, the iteration whose state the run restores."""

    @property
    def last(self) -> int:
        """Iteration whose state the run restores."""
        return self.reaches

    def loads(self, iteration: int) -> npt.NDArray[np.int8]:
        """Return full state where the newest one is in ``SS_iteration``, nothing elsewhere, int8 ``[operators]``."""
        return np.where(self.full_at == iteration, np.int8(Saved.FULL), np.int8(Saved.NOTHING))


def recoverable_runs(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
    """Yield every recoverable run, each as short as its first snapshot allows; the run that begins last comes first.

    Args:
        snapshots: contents of each available snapshot, by iteration. A torn or missing snapshot is left out.
        until: iteration that is to be recovered; later snapshots are not used.

    Raises:
        ScheduleError: snapshots have different numbers of operators.
    """
    usable = {i: saved for i, saved in snapshots.items() if until is None or i <= until}
    for iteration, covered, full_at in _backwards(usable, beyond=False):
        if covered.all():
            yield RecoverableRun(iteration, full_at.copy())


def open_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Yield, newest first, where a sequence of snapshots begins that is or may become recoverable.

    The newest of ``snapshots`` must be the last one taken, because no run reaches over a gap.
    """
    for iteration, covered, _ in _backwards(snapshots, beyond=True):
        if covered.all():
            yield iteration


def _backwards(
    snapshots: Mapping[int, Contents], beyond: bool
) -> Iterator[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
    """Go back from the newest snapshot, and yield for each one its iteration and two arrays over operators.

    The first is a mask of operators with weights in the whole run that begins there. The second is the iteration of the
    snapshot with the operator's full state.

    Args:
        snapshots: contents of each snapshot, by iteration.
        beyond: True if an operator's full state may still come after the newest snapshot.
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
                f"snapshot {iteration} is of {len(saved)} operators, snapshot {newest} of {operators}; snapshots of "
                "different tables cannot be used together"
            )
        if iteration != expected:  # a snapshot is missing, and no run crosses a gap
            covered = np.zeros(operators, dtype=bool)
        full = saved == Saved.FULL
        covered = full | (covered & (saved == Saved.COMPUTE))
        full_at[full] = iteration
        yield iteration, covered, full_at
        expected = iteration - 1
