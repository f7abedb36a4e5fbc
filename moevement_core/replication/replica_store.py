"""Store of copies of another rank's snapshots in host memory. The store outlives the connection to that rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import override

from moevement_core.device import Device
from moevement_core.policy.holding import superseded
from moevement_core.replication.allowance import Who
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.store_memory import StoreMemory
from moevement_core.snapshot.arena import in_pages
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease
from moevement_core.util.iterations import newest_of


@dataclass(slots=True, eq=False)
class _Replica:
    """Snapshot that the store keeps, or that the store has freed while readers still use the buffer."""

    snapshot: Snapshot
    readers: int = 0
    freed: bool = False


class ReplicaMemory(StoreMemory):
    """Host memory for the copies of one source."""

    def __init__(self, key: Who, device: Device) -> None:
        super().__init__(key, device)
        self._promised = 0
        """Bytes promised to the source. Some of this memory may be released; it is allocated again on demand."""
        self._is_fitting = False
        """True while :meth:`trim` still has memory to free."""

    @property
    @override
    def room_bytes(self) -> int:
        return max(self.arena.nbytes, self._promised)

    @override
    def grow(self, nbytes: int) -> None:
        super().grow(nbytes)
        self._promised, self._is_fitting = nbytes, False

    @override
    def need(self, source: int, nbytes: int) -> None:
        if nbytes != self._promised and nbytes <= self.room_bytes:
            self._promised, self._is_fitting = nbytes, True
            self.arena.watch()

    @override
    def trim(self) -> bool:
        before = self.arena.nbytes
        self._is_fitting = self._is_fitting and self.arena.fit(self._promised)
        return self.arena.nbytes < before

    def reallocate(self, nbytes: int) -> None:
        """Allocate released memory again, for a snapshot of ``nbytes`` bytes, up to the promised total.

        Raises:
            RuntimeError: the host has too little memory.
        """
        self.arena.grow(min(self._promised, self.arena.nbytes + in_pages(nbytes)))


class ReplicaStore(PeerStore):
    """Store of the copies of one source. Any thread may use it.

    Args:
        source: rank whose snapshots are kept.
        device: device whose host memory holds the copies.
    """

    memory: ReplicaMemory

    def __init__(self, source: int, device: Device) -> None:
        super().__init__(source, ReplicaMemory(source, device))
        self._replicas: dict[int, _Replica] = {}
        self._lock = threading.Lock()

    def snapshots(self) -> dict[int, Snapshot]:
        """Return the kept snapshots by iteration. All of them arrived whole."""
        with self._lock:
            return {iteration: replica.snapshot for iteration, replica in self._replicas.items()}

    @override
    def schedules(self) -> dict[int, str]:
        return {iteration: snapshot.header.schedule for iteration, snapshot in self.snapshots().items()}

    def lease(self, iteration: int) -> SnapshotLease | None:
        """Return ``SS_iteration`` for a reader; None if the store does not have this snapshot.

        The snapshot's buffer stays unchanged until the reader releases the returned object.
        """
        with self._lock:
            replica = self._replicas.get(iteration)
            if replica is None:
                return None
            replica.readers += 1
            return SnapshotLease(replica.snapshot, lambda: self._give_back(replica))

    def free_before(self, iteration: int) -> None:
        """Free snapshots before ``iteration``, which no recovery needs, and refuse them from now on."""
        with self._lock:
            self.floor = newest_of((self.floor, iteration))
            self._release([kept for kept in self._replicas if kept < iteration])

    def drop(self, first: int, count: int) -> None:
        """Free the snapshots of ``count`` iterations from ``first`` on."""
        with self._lock:
            self._release([kept for kept in self._replicas if first <= kept < first + count])

    def free_unneeded(self, last: int) -> None:
        """Free the parts of snapshots that no recovery needs; see :meth:`PeerStore.free_unneeded`."""
        with self._lock:
            held = {iteration: replica.snapshot.contents for iteration, replica in self._replicas.items()}
            for iteration, unneeded in superseded(held, last).items():
                replica = self._replicas[iteration]
                if not replica.readers:  # a later call frees the parts of a snapshot that has readers now
                    replica.snapshot, ranges = replica.snapshot.without(unneeded)
                    self.memory.arena.release_parts(replica.snapshot.buffer, ranges)

    def begin(self, iteration: int, nbytes: int) -> Buffer | None:
        """Return memory for ``SS_iteration``, which is about to arrive; None if too little memory is free.

        If the store already has a copy of this snapshot, it frees that copy first.
        """
        with self._lock:
            if iteration in self._replicas:
                self._release([iteration])
        return self.memory.arena.acquire(nbytes)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot that arrived whole.

        The method drops a snapshot older than :attr:`floor`, because a newer window was persisted while it arrived.
        """
        with self._lock:
            if self.accepts(snapshot.iteration):
                self._replicas[snapshot.iteration] = _Replica(snapshot)
            else:
                self.memory.arena.release(snapshot.buffer)

    def _give_back(self, replica: _Replica) -> None:
        with self._lock:
            replica.readers -= 1
            self._release_unless_read(replica)

    def _release(self, iterations: list[int]) -> None:
        for iteration in iterations:
            replica = self._replicas.pop(iteration)
            replica.freed = True
            self._release_unless_read(replica)

    def _release_unless_read(self, replica: _Replica) -> None:
        if replica.freed and not replica.readers:
            self.memory.arena.release(replica.snapshot.buffer)
