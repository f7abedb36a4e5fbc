"""Store of copies of another rank's snapshots in host memory. The store outlives the connection to that rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import override

from moevement_core.device import Device
from moevement_core.policy.holding import superseded
from moevement_core.replication.peer_store import PeerStore
from moevement_core.snapshot.arena import Arena, in_pages
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease
from moevement_core.util.iterations import newest_of


@dataclass(slots=True, eq=False)
class _Replica:
    """Snapshot that the store keeps, or that the store has freed while readers still use the buffer."""

    snapshot: Snapshot
    readers: int = 0
    freed: bool = False


class ReplicaStore(PeerStore):
    """Store of the copies of one source. Any thread may use it.

    Args:
        source: rank whose snapshots are kept.
        device: device whose host memory holds the copies.
    """

    def __init__(self, source: int, device: Device) -> None:
        super().__init__(source)
        self._arena = Arena(device)
        self._promised = 0
        """Bytes promised to the source. The store may release some of this memory, and allocates it again on demand."""
        self._is_fitting = False
        """True while :meth:`trim` still has memory to free."""
        self._replicas: dict[int, _Replica] = {}
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory allocated for this source."""
        return self._arena.nbytes

    @property
    @override
    def room_bytes(self) -> int:
        return max(self._arena.nbytes, self._promised)

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
                    self._arena.release_parts(replica.snapshot.buffer, ranges)

    @override
    def wait_for_room(self, nbytes: int, timeout_s: float) -> None:
        self._arena.wait_for(nbytes, timeout_s)

    def make_room(self, nbytes: int) -> None:
        """Allocate memory up to a total of ``nbytes`` bytes.

        Raises:
            RuntimeError: the host has too little memory.
        """
        self._arena.grow(nbytes)
        self._promised, self._is_fitting = nbytes, False

    @override
    def need(self, nbytes: int) -> None:
        if nbytes != self._promised and nbytes <= self.room_bytes:
            self._promised, self._is_fitting = nbytes, True
            self._arena.watch()

    @override
    def trim(self) -> bool:
        before = self._arena.nbytes
        self._is_fitting = self._is_fitting and self._arena.fit(self._promised)
        return self._arena.nbytes < before

    def begin(self, iteration: int, nbytes: int) -> Buffer | None:
        """Return memory for ``SS_iteration``, which is about to arrive; None if too little memory is free.

        If the store already has a copy of this snapshot, it frees that copy first.
        """
        with self._lock:
            if iteration in self._replicas:
                self._release([iteration])
        return self._arena.acquire(nbytes)

    def reallocate(self, nbytes: int) -> None:
        """Allocate released memory again, for a snapshot of ``nbytes`` bytes, up to the promised total.

        Raises:
            RuntimeError: the host has too little memory.
        """
        self._arena.grow(min(self._promised, self._arena.nbytes + in_pages(nbytes)))

    def give_up(self, buffer: Buffer) -> None:
        """Release the buffer of a snapshot that did not arrive whole."""
        self._arena.release(buffer)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot that arrived whole.

        The method drops a snapshot older than :attr:`floor`, because a newer window was persisted while it arrived.
        """
        with self._lock:
            if self.accepts(snapshot.iteration):
                self._replicas[snapshot.iteration] = _Replica(snapshot)
            else:
                self._arena.release(snapshot.buffer)

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
            self._arena.release(replica.snapshot.buffer)
