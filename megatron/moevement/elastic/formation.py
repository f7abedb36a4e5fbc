"""Snapshots from before the job's last change of ranks, which a rank can send to others afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.moevement.elastic.pieces import RankPosition
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.sources import holding_of
from moevement_core.snapshot.snapshot import Snapshot


@dataclass(frozen=True)
class Formation:
    """Ranks of a job from one forming to the next failure."""

    generation: int
    """Generation in which the job was formed. It is part of the identity, because a job may return to an earlier size
    with other state in the same positions.
    """
    stands: tuple[RankPosition, ...]
    """Positions of all ranks of the formation, in rank order."""


@dataclass(frozen=True, eq=False)
class FormationSnapshots:
    """Snapshots of one formation that this process can send to other ranks."""

    formation: Formation
    own: int
    """Rank of this process in that formation; -1 if it had none."""
    holdings: Sequence[Holding]
    open: Callable[[Holding], Snapshot | None]
    """Function that opens one snapshot without checking it; it returns None if the snapshot is not readable."""

    @staticmethod
    def in_memory(snapshots: Sequence[Snapshot], formation: Formation, rank: int) -> FormationSnapshots:
        """Return the snapshots that this process captured and those it keeps for peers.

        Args:
            snapshots: snapshots of one formation.
            formation: the formation.
            rank: rank of this process in it.
        """
        by_holding = {
            holding_of(snapshot, Source.MEMORY if snapshot.header.rank == rank else Source.PEER): snapshot
            for snapshot in snapshots
        }
        return FormationSnapshots(formation, rank, list(by_holding), by_holding.get)
