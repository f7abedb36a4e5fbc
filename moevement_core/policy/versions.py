"""Runs of snapshots that restore operators of different age (MoC-System, section 3.1; MoEtion, section 6).

A snapshot that leaves operators out (:attr:`Saved.OMITTED`) requires that a recovery takes the newest older version of
them. So a state is restored from the newest snapshot and, for each operator that it leaves out, from the newest earlier
snapshot that has the operator. The updates in between are lost. If snapshots are missing, older versions are used.

A version is full state, or full state and the gradients of every update after it (MoEtion, section 5.2).
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
    """Snapshots ``first`` to ``last``, which together hold the newest version of each operator."""

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
        """Return a mask of the operators that repeat or execute their update of ``iteration``, bool ``[operators]``.

        These are all operators if ``iteration`` comes after the run.
        """
        return (self.full_at < iteration) & ((iteration <= self.version_at) | (iteration > self.last))

    @property
    def snapshots(self) -> set[int]:
        """Iterations of the snapshots that a recovery reads."""
        pairs = set(zip(self.full_at.tolist(), self.version_at.tolist(), strict=True))
        return {self.last}.union(*(range(full, version + 1) for full, version in pairs))


def version_runs(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[VersionRun]:
    """Yield the run that ends with each snapshot, the newest first.

    A snapshot has no run if an operator has no version by then.

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
    """Yield the iterations with which a run may still begin: snapshots newer than the beginning of the newest run."""
    newest = next(version_runs(snapshots), None)
    for iteration, saved in snapshots.items():
        if leaves_out(saved) and (newest is None or iteration > newest.first):
            yield iteration


def leaves_out(saved: Contents) -> bool:
    """Return True if a snapshot leaves operators to older snapshots."""
    return bool((saved == Saved.OMITTED).any())


def _is_of_versions(saved: Contents) -> bool:
    return bool(((saved != Saved.NOTHING) & (saved != Saved.COMPUTE)).all())
