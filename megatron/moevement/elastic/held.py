"""Snapshots of a job that a rank can hand out when the job is put together again, whatever its size was then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.moevement.elastic.pieces import Stand
from moevement_core.recovery.plan import Holding, Source
from moevement_core.session.sources import holding_of
from moevement_core.snapshot.snapshot import Snapshot

Stands = tuple[Stand, ...]
"""Of all ranks of a job, in their order."""


@dataclass(frozen=True, eq=False)
class Held:
    """Snapshots of one job that this rank can hand out."""

    stands: Stands
    """Of all ranks of that job."""
    own: int
    """The rank of it that this process was; -1: none."""
    holdings: Sequence[Holding]
    open: Callable[[Holding], Snapshot | None]
    """One of them, not yet checked; nothing if it cannot be read."""

    @staticmethod
    def in_memory(snapshots: Sequence[Snapshot], stands: Sequence[Stand], rank: int) -> Held:
        """Own snapshots and those that are kept for others.

        Args:
            snapshots: of a job.
            stands: of all ranks of that job.
            rank: that this process was in it.
        """
        found = {holding_of(one, Source.MEMORY if one.header.rank == rank else Source.PEER): one for one in snapshots}
        return Held(tuple(stands), rank, list(found), found.get)
