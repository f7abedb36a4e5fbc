"""Which snapshots recover a state, by what they hold (MoEvement section 3.3; figure 8).

Consecutive snapshots ``SS_a ... SS_b`` are a recoverable run if every operator's full state is in one of them, and its
compute weights are in each one before that. Then ``SS_a`` is loaded, iteration a+1 is replayed, ``SS_(a+1)`` is loaded,
and so on: an operator is frozen until its full state has been loaded, active from then on, and with ``SS_b`` all are.
Nothing is inferred from indices, so a run may reach across a reorder or a new window size.
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
    """a: where replay begins, from ``state@first``."""
    full_at: npt.NDArray[np.int64]
    """The snapshot that each operator's full state is loaded from, int64 ``[operators]``."""

    @property
    def last(self) -> int:
        """b: the first iteration at which every operator is active, so the state is dense."""
        return int(self.full_at.max())

    @property
    def is_redone(self) -> bool:
        """True if updates up to ``last`` are repeated from gradients, and no iteration is executed."""
        return False

    @property
    def is_stale(self) -> bool:
        """True if some operators are older than others in the restored state: updates of them are lost."""
        return False

    @property
    def version_at(self) -> npt.NDArray[np.int64]:
        """The iteration as of which each operator's state is the newest one that is restored, int64 ``[operators]``."""
        return np.full_like(self.full_at, self.last)

    def is_at(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Which operators have the state of ``iteration`` when all that leads there is done, bool ``[operators]``."""
        return self.full_at <= iteration

    def active_in(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Which operators are active while ``iteration`` is replayed, bool ``[operators]``; the others are frozen."""
        return self.full_at < iteration

    def loads(self, iteration: int) -> npt.NDArray[np.int8]:
        """Return what is loaded of each operator from ``SS_iteration`` before the next iteration is replayed, int8
        ``[operators]``.

        Full state where it becomes active, compute weights while it is still frozen, nothing once it is active.
        """
        loads = np.full(len(self.full_at), Saved.NOTHING, dtype=np.int8)
        loads[self.full_at > iteration] = Saved.COMPUTE
        loads[self.full_at == iteration] = Saved.FULL
        return loads


@dataclass(frozen=True, eq=False)
class NewestStateRun(RecoverableRun):
    """Snapshots ``first`` to ``last`` of which each operator's newest full state is loaded; no iteration is run."""

    reaches: int
    """c."""

    @property
    def last(self) -> int:
        """The iteration whose state it gives."""
        return self.reaches

    def loads(self, iteration: int) -> npt.NDArray[np.int8]:
        """Full state where it is the newest, int8 ``[operators]``; what is older is not needed meanwhile."""
        return np.where(self.full_at == iteration, np.int8(Saved.FULL), np.int8(Saved.NOTHING))


def recoverable_runs(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
    """Yield every recoverable run, each as short as its first snapshot allows; the first begins last.

    Args:
        snapshots: what each available snapshot holds, by iteration. A snapshot that is torn, or gone, is not in it.
        until: the iteration that is to be recovered; snapshots of later ones are not used.

    Raises:
        ScheduleError: snapshots of different numbers of operators.
    """
    usable = {i: saved for i, saved in snapshots.items() if until is None or i <= until}
    for iteration, covered, full_at in _backwards(usable, beyond=False):
        if covered.all():
            yield RecoverableRun(iteration, full_at.copy())


def open_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Yield the beginnings of runs that are recoverable or may become so with coming snapshots, the newest first.

    The newest of ``snapshots`` must be the last one taken: no run reaches over one that was left out.
    """
    for iteration, covered, _ in _backwards(snapshots, beyond=True):
        if covered.all():
            yield iteration


def _backwards(
    snapshots: Mapping[int, Contents], beyond: bool
) -> Iterator[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
    """Go from the newest snapshot back; yield for each which operators a run that begins there has weights of
    throughout.

    Args:
        snapshots: what each holds.
        beyond: whether an operator's full state may still come after the newest.
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
        if iteration != expected:  # one is missing in between, and no run crosses a gap
            covered = np.zeros(operators, dtype=bool)
        full = saved == Saved.FULL
        covered = full | (covered & (saved == Saved.COMPUTE))
        full_at[full] = iteration
        yield iteration, covered, full_at
        expected = iteration - 1
