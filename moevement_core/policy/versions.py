"""Runs of snapshots that restore operators of different age (MoC-System, section 3.1; MoEtion, section 6).

Some snapshots leave operators out (:attr:`Saved.OMITTED`). A recovery restores such an operator from the newest earlier
snapshot that has it, and all other operators from the newest snapshot. The operator's updates in between are lost. If
snapshots are missing, a recovery uses older versions.

A version of an operator is its full state, or its full state and the gradients of consecutive updates after it
(MoEtion, section 5.2).
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
    """Iteration of each operator's version, int64 ``[operators]``; see :attr:`version_at`."""

    @property
    @override
    def version_at(self) -> npt.NDArray[np.int64]:
        return self.versions

    @property
    def is_stale(self) -> bool:
        """True if some operators are older than others."""
        return True

    @property
    def is_redone(self) -> bool:
        """True if any version ends with gradients."""
        return bool((self.version_at > self.full_at).any())

    @override
    def is_at(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that have exactly the state of ``iteration``, bool ``[operators]``."""
        return (self.full_at <= iteration) & (iteration <= self.version_at)

    @override
    def active_in(self, iteration: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the operators that are updated while ``iteration`` is recovered, bool ``[operators]``.

        Up to the end of the run, operators repeat updates from gradients. After the run, all operators are updated.
        """
        return (self.full_at < iteration) & ((iteration <= self.version_at) | (iteration > self.last))

    @property
    def snapshots(self) -> set[int]:
        """Iterations of the snapshots that a recovery reads."""
        pairs = set(zip(self.full_at.tolist(), self.version_at.tolist(), strict=True))
        return {self.last}.union(*(range(full, version + 1) for full, version in pairs))


def version_runs(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[VersionRun]:
    """Yield for each snapshot the run that ends with it, the newest first.

    A snapshot has no run if it and all earlier snapshots lack a version of some operator.

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
    """Yield the iterations of snapshots with which a later run may begin.

    These snapshots leave operators out, and are newer than the first snapshot of the newest run.
    """
    newest = next(version_runs(snapshots), None)
    for iteration, saved in snapshots.items():
        if leaves_out(saved) and (newest is None or iteration > newest.first):
            yield iteration


def leaves_out(saved: Contents) -> bool:
    """Return True if a snapshot leaves operators out, for which older snapshots are used."""
    return bool((saved == Saved.OMITTED).any())


def _is_of_versions(saved: Contents) -> bool:
    return bool(((saved != Saved.NOTHING) & (saved != Saved.COMPUTE)).all())
