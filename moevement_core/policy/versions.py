"""Which snapshots restore a state whose operators are of different age (MoC-System, section 3.1).

A snapshot that leaves operators out (:attr:`Saved.OMITTED`) says that a recovery is to take the newest older version of
them. So a state is restored from the newest snapshot and, for each operator that it leaves out, from the newest one
before it that has it; updates in between are lost. Where snapshots are missing, older versions take their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from moevement_core.policy.recoverable import NewestStateRun
from moevement_core.policy.schedule import Contents, Saved


class VersionRun(NewestStateRun):
    """Snapshots ``first`` to ``last`` of which each operator has its newest version in one."""

    @property
    def is_stale(self) -> bool:
        """Whether some operators are older than others."""
        return True


def version_runs(snapshots: Mapping[int, Contents], until: int | None = None) -> Iterator[VersionRun]:
    """The state that each snapshot restores with those before it, the newest first.

    Args:
        snapshots: what each available snapshot holds, by iteration.
        until: later snapshots are not used.
    """
    usable = {
        iteration: saved
        for iteration, saved in snapshots.items()
        if (until is None or iteration <= until) and _is_of_versions(saved)
    }
    newest = sorted(usable, reverse=True)
    for place, last in enumerate(newest):
        full_at = np.full(len(usable[last]), -1, dtype=np.int64)
        is_open = np.ones(len(full_at), dtype=bool)
        for iteration in newest[place:]:
            found = is_open & (usable[iteration] == Saved.FULL)
            full_at[found] = iteration
            is_open &= ~found
            if not is_open.any():
                yield VersionRun(int(full_at.min()), full_at, last)
                break


def open_version_starts(snapshots: Mapping[int, Contents]) -> Iterator[int]:
    """Where such a run may still begin: with every snapshot that is newer than the beginning of the newest run."""
    newest = next(version_runs(snapshots), None)
    for iteration, saved in snapshots.items():
        if leaves_out(saved) and (newest is None or iteration > newest.first):
            yield iteration


def leaves_out(saved: Contents) -> bool:
    """Whether a snapshot leaves operators to older ones."""
    return bool((saved == Saved.OMITTED).any())


def _is_of_versions(saved: Contents) -> bool:
    return bool(((saved == Saved.FULL) | (saved == Saved.OMITTED)).all())
