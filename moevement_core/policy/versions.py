"""Runs of snapshots that restore some operators to older iterations (MoC-System, section 3.1; MoEtion, section 6).

Some snapshots leave operators out (:attr:`Saved.OMITTED`). A recovery restores such an operator from the newest earlier
snapshot that has it, and all other operators from the newest snapshot. The operator's updates between these two
snapshots are lost. If the snapshot with the newest version is missing, a recovery uses an older version.

A version of an operator is its full state in a snapshot. With MoEtion it may also be this full state and the gradients
of the updates right after it, from the snapshots that follow (section 5.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import override

import numpy as np
import numpy.typing as npt

from moevement_core.policy.recoverable import NewestStateRun
from moevement_core.policy.schedule import Contents, Saved


@dataclass(frozen=True, eq=False)
class VersionRun(NewestStateRun):
    """Snapshots ``first`` to ``last`` that together hold the newest version of each operator."""

    versions: npt.NDArray[np.int64]
    """Iteration to which the run restores each operator, int64 ``[operators]``; :attr:`version_at` returns it."""

    @property
    @override
    def version_at(self) -> npt.NDArray[np.int64]:
        return self.versions

    @property
    def is_stale(self) -> bool:
        """True, because a recovery from this run may restore some operators to older iterations than others."""
        return True

    @property
    def is_redone(self) -> bool:
        """True if the version of any operator consists of a full state and gradients, so that updates are repeated."""
        return bool((self.version_at > self.full_at).any())

    @override
    def is_at(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that have exactly the state of ``iteration``, bool ``[operators]``."""
        return (self.full_at <= iteration) & (iteration <= self.version_at)

    @override
    def active_in(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that are updated while ``iteration`` is recovered, bool ``[operators]``.

        Up to the run's last iteration, these are the operators whose update is repeated from gradients. In a later
        iteration they are all operators, because the iteration is executed again.
        """
        return (self.full_at < iteration) & ((iteration <= self.version_at) | (iteration > self.last))

    @property
    def snapshots(self) -> set[int]:
        """Iterations of the snapshots that a recovery reads."""
        pairs = set(zip(self.full_at.tolist(), self.version_at.tolist(), strict=True))
        return {self.last}.union(*(range(full, version + 1) for full, version in pairs))


def version_runs(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[VersionRun]:
    """Yield for each snapshot the run that ends with this snapshot, the newest run first.

    A snapshot has no run if there is an operator whose full state is neither in it nor in an earlier snapshot.

    Args:
        snapshots: contents of each available snapshot, by iteration.
        until: last iteration of a run; later snapshots are not used.
    """
    usable = {
        iteration: saved
        for iteration, saved in sorted(snapshots.items())
        if (until is None or iteration <= until) and _is_of_versions(saved)
    }
    runs = []
    full_at = version_at = np.full(len(next(iter(usable.values()), ())), NEVER, dtype=np.int64)
    for iteration, saved in usable.items():
        is_full = saved == Saved.FULL
        goes_on = (saved == Saved.GRADIENT) & (version_at == iteration - 1)
        full_at = np.where(is_full, iteration, full_at)
        version_at = np.where(is_full | goes_on, iteration, version_at)
        if (full_at != NEVER).all():
            runs.append(VersionRun(int(full_at.min()), full_at, iteration, version_at))
    return reversed(runs)


NEVER = -(1 << 40)


def open_version_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Yield the iterations of snapshots that may become the first snapshot of a later run.

    These are the snapshots that leave operators out and are newer than the first snapshot of the newest run.
    """
    newest = next(version_runs(snapshots), None)
    for iteration, saved in snapshots.items():
        if leaves_out(saved) and (newest is None or iteration > newest.first):
            yield iteration


def leaves_out(saved: Contents) -> bool:
    """Return True if a snapshot leaves out operators that a recovery restores from older snapshots."""
    return bool((saved == Saved.OMITTED).any())


def _is_of_versions(saved: Contents) -> bool:
    return bool(((saved != Saved.NOTHING) & (saved != Saved.COMPUTE)).all())
