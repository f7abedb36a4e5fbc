"""Sources of snapshots for a recovery on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import override

from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.recovery.holdings import Holding, Source
from moevement_core.recovery.sums import Summed
from moevement_core.recovery.take_part import summed
from moevement_core.replication.parity.store import GroupStore, MemberStore, Stripe
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease


class SnapshotSource(ABC):
    """Source of snapshots on one rank: its memory, or files."""

    @abstractmethod
    def holdings(self) -> Sequence[Holding]:
        """Return descriptions of all snapshots of this source; their bytes may not have been checked yet."""

    @abstractmethod
    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """Return one snapshot; None if it was dropped since :meth:`holdings` listed it."""

    def path_of(self, owner: int, iteration: int) -> Path | None:
        """Return the file of a snapshot; None if the source has no files."""
        return None

    def summed(self) -> Sequence[Summed]:
        """Return the parity blocks of this source."""
        return ()

    def open_sum(self, first: int, iteration: int) -> tuple[GroupStore, Stripe] | None:
        """Return a parity block of the group whose first member is rank ``first``, with the store that holds it.

        The store does not free the block before the caller ends the reading (``GroupStore.end_reading``).

        Returns:
            None if the block was dropped since :meth:`summed` listed it.
        """
        return None


class UpTo(SnapshotSource):
    """Snapshots of another source up to an iteration, because later ones are not trusted.

    Args:
        iteration: newest iteration whose snapshots are used.
        inner: the other source.
    """

    def __init__(self, iteration: int, inner: SnapshotSource) -> None:
        self._iteration, self._inner = iteration, inner

    @override
    def holdings(self) -> Sequence[Holding]:
        return [holding for holding in self._inner.holdings() if holding.iteration <= self._iteration]

    @override
    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        return self._inner.open(source, owner, iteration)

    @override
    def path_of(self, owner: int, iteration: int) -> Path | None:
        return self._inner.path_of(owner, iteration)

    @override
    def summed(self) -> Sequence[Summed]:
        return [block for block in self._inner.summed() if block.iteration <= self._iteration]

    @override
    def open_sum(self, first: int, iteration: int) -> tuple[GroupStore, Stripe] | None:
        return self._inner.open_sum(first, iteration)


class MemorySource(SnapshotSource):
    """Snapshots in this rank's host memory: its own, and those that it keeps for others.

    Args:
        checkpointer: checkpointer of this rank.
        durable: snapshots of this rank, by iteration, that are in files as well. They stay in memory because the files
            lack some operators.
    """

    def __init__(self, checkpointer: Checkpointer, durable: Mapping[int, Snapshot] | None = None) -> None:
        self._checkpointer, self._durable = checkpointer, durable or {}
        self._leases: list[SnapshotLease] = []

    def release(self) -> None:
        """Release all opened snapshots, so that they can be freed. Called when the recovery has read them."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    def holdings(self) -> list[Holding]:
        """Return all snapshots in memory, without a check of their bytes.

        Checking every byte of all kept snapshots would take longer than the rest of a recovery. Instead, a snapshot is
        checked when it is fetched. If it is damaged, ranks plan the recovery again without it.
        """
        snapshots = {**self._durable, **self._checkpointer.own.snapshots}
        own = [(Source.MEMORY, snapshot) for snapshot in snapshots.values()]
        kept = [
            (Source.PEER, snapshot)
            for store in self._checkpointer.replicator.stores
            for snapshot in store.snapshots().values()
        ]
        return [holding_of(snapshot, source) for source, snapshot in own + kept]

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """Return one snapshot; None if it was dropped since :meth:`holdings` listed it.

        If the snapshot is this rank's own, it is not freed before :meth:`release`.
        """
        if source is Source.MEMORY:
            if (lease := self._checkpointer.own.lease(iteration)) is None:
                return self._durable.get(iteration)
            self._leases.append(lease)  # Without a lease, the snapshot would be dropped once all peers have it.
            return lease.snapshot
        stores = (store for store in self._checkpointer.replicator.stores if store.source == owner)
        return next((snapshot for store in stores if (snapshot := store.snapshots().get(iteration)) is not None), None)

    def summed(self) -> list[Summed]:
        """Return all parity blocks."""
        return [sum_ for group in self._groups() for sum_ in summed(group)]

    def open_sum(self, first: int, iteration: int) -> tuple[GroupStore, Stripe] | None:
        """Return a parity block, which stays in memory until the caller ends the reading.

        Returns:
            None if the block was dropped since :meth:`summed` listed it, is damaged, or contains a snapshot only in
            part.
        """
        for group in self._groups():
            if group.group.members[0] == first and (stripe := group.lease(iteration)) is not None:
                return group, stripe
        return None

    def _groups(self) -> list[GroupStore]:
        stores = self._checkpointer.replicator.stores
        return list(dict.fromkeys(store.group for store in stores if isinstance(store, MemberStore)))


def holding_of(snapshot: Snapshot, source: Source) -> Holding:
    """Return the description of a snapshot that a rank reports to all ranks."""
    header = snapshot.header
    return Holding(
        owner=header.rank,
        iteration=header.iteration,
        state=header.state,
        schedule=header.schedule,
        contents=header.contents,
        source=source,
    )
