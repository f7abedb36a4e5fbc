"""Snapshots of a job that a rank can hand out when the job is put together again, whatever its size was then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.moevement.elastic.pieces import Stand
from moevement_core.recovery.places import Holding, Source
from moevement_core.session.sources import holding_of
from moevement_core.snapshot.snapshot import Snapshot


@dataclass(frozen=True)
class Formation:
    """A job from one forming to the next."""

    generation: int
    """Generation in which it was formed: a job may return to an earlier size, with other state in the same places."""
    stands: tuple[Stand, ...]
    """Positions of all its ranks, in their order."""


@dataclass(frozen=True, eq=False)
class Held:
    """Snapshots of one formation that this rank can hand out."""

    formation: Formation
    own: int
    """The rank that this process was in it; -1: none."""
    holdings: Sequence[Holding]
    open: Callable[[Holding], Snapshot | None]
    """Opens one snapshot, not yet checked; returns None if it cannot be read."""

    @staticmethod
    def in_memory(snapshots: Sequence[Snapshot], formation: Formation, rank: int) -> Held:
        """Own snapshots and those that are kept for others.

        Args:
            snapshots: of a formation.
            formation: which.
            rank: that this process was in it.
        """
        found = {holding_of(one, Source.MEMORY if one.header.rank == rank else Source.PEER): one for one in snapshots}
        return Held(formation, rank, list(found), found.get)
