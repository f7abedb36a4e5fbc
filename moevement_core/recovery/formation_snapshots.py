"""Snapshots that a rank still has from before an elastic job changed its ranks, and can send to the present ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moevement_core.elastic.layout import Formation
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.sources import holding_of
from moevement_core.snapshot.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class FormationSnapshots:
    """Snapshots that ranks captured in one :class:`Formation`, and that this process can send to other ranks."""

    formation: Formation
    own: int
    """Rank of this process in the formation; -1 if the snapshots are from disk."""
    holdings: Sequence[Holding]
    open: Callable[[Holding], Snapshot | None]
    """Function that opens a snapshot without a check of its digests; it returns None for an unreadable snapshot."""

    @staticmethod
    def in_memory(snapshots: Sequence[Snapshot], formation: Formation, rank: int) -> FormationSnapshots:
        """Return the snapshots that this process captured or keeps for peers.

        Args:
            snapshots: snapshots of one formation.
            formation: formation in which the snapshots were captured.
            rank: rank of this process in the formation.
        """
        by_holding = {
            holding_of(snapshot, Source.MEMORY if snapshot.header.rank == rank else Source.PEER): snapshot
            for snapshot in snapshots
        }
        return FormationSnapshots(formation, rank, list(by_holding), by_holding.get)
