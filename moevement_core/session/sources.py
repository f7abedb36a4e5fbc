"""Where a rank has snapshots for a recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.recovery.plan import Holding, Source
from moevement_core.snapshot.snapshot import Snapshot


class SnapshotSource(Protocol):
    """Somewhere a rank has snapshots: its memory, or files."""

    def holdings(self) -> Sequence[Holding]:
        """All that it has, checked or not."""

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """One of them; nothing if it is gone meanwhile."""


class MemorySource:
    """Snapshots in this rank's host memory: its own, and those that it keeps for others."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def holdings(self) -> list[Holding]:
        """All; what is damaged is found when it is fetched, which plans again without it, and not before.

        To check every byte of everything that is kept would take longer than the rest of a recovery.
        """
        own = [(Source.MEMORY, snapshot) for snapshot in self._checkpointer.own.snapshots().values()]
        kept = [
            (Source.PEER, snapshot)
            for store in self._checkpointer.replicator.stores
            for snapshot in store.snapshots().values()
        ]
        return [holding_of(snapshot, source) for source, snapshot in own + kept]

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """One of them; nothing if it is gone meanwhile."""
        if source is Source.MEMORY:
            return self._checkpointer.own.snapshots().get(iteration)
        stores = (store for store in self._checkpointer.replicator.stores if store.source == owner)
        return next((store.snapshots().get(iteration) for store in stores), None)


def holding_of(snapshot: Snapshot, source: Source) -> Holding:
    """How a snapshot is reported."""
    header = snapshot.header
    return Holding(header.rank, header.iteration, header.state, header.schedule, header.contents, source)
