"""Copies of another rank's snapshots in this rank's host memory; they outlive the connection that brought them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from moevement_core.device import Device
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.pool import BufferPool
from moevement_core.snapshot.snapshot import Header, Snapshot, SnapshotLease


@dataclass(slots=True, eq=False)
class _Replica:
    """A snapshot that is kept, or still read."""

    snapshot: Snapshot
    pool: BufferPool
    readers: int = 0
    freed: bool = False

    def release_unless_read(self) -> None:
        if self.freed and not self.readers:
            self.pool.release(self.snapshot.buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A buffer for a snapshot that is about to arrive; :meth:`ReplicaStore.add` or :meth:`give_up` it."""

    pool: BufferPool
    buffer: torch.Tensor

    def give_up(self) -> None:
        """Nothing whole has arrived."""
        self.pool.release(self.buffer)


class ReplicaStore:
    """The copies of one source. May be used from any thread.

    Args:
        source: the rank whose snapshots are kept.
        device: whose host memory they go to.
    """

    def __init__(self, source: int, device: Device) -> None:
        self.source = source
        self.floor = NONE
        """Older snapshots are stale."""
        self._device = device
        self._pool: BufferPool | None = None
        self._replicas: dict[int, _Replica] = {}
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Host memory set aside for this source."""
        return self._pool.total_bytes if self._pool else 0

    @property
    def largest_bytes(self) -> int:
        """Of a snapshot; 0 before room was made."""
        return self._pool.nbytes if self._pool else 0

    def snapshots(self) -> dict[int, Snapshot]:
        """What is kept now, by iteration; every one was whole when it came."""
        with self._lock:
            return {iteration: one.snapshot for iteration, one in self._replicas.items()}

    def lease(self, iteration: int) -> SnapshotLease | None:
        """A snapshot that is kept, whose buffer stays as it is until it is given back; nothing if there is none."""
        with self._lock:
            replica = self._replicas.get(iteration)
            if replica is None:
                return None
            replica.readers += 1
            return SnapshotLease(replica.snapshot, lambda: self._give_back(replica))

    def free_before(self, iteration: int) -> None:
        """Let go of snapshots that no recovery needs any more, and refuse such ones from now on."""
        with self._lock:
            self.floor = max(self.floor, iteration)
            self._release([kept for kept in self._replicas if kept < iteration])

    def drop(self, first: int, count: int) -> None:
        """Let go of ``count`` iterations from ``first`` on."""
        with self._lock:
            self._release([kept for kept in self._replicas if first <= kept < first + count])

    def has_room_for(self, count: int, nbytes: int) -> bool:
        """Whether so much room was made before, in buffers of that size."""
        return self._pool is not None and self._pool.nbytes == nbytes and self._pool.count >= count

    def make_room(self, count: int, nbytes: int) -> None:
        """Allocate ``count`` buffers of ``nbytes``.

        Raises:
            RuntimeError: there is not so much memory.
        """
        if self._pool is not None and self._pool.nbytes == nbytes and self._pool.count < count:
            self._pool.grow(count)
            return
        pool = BufferPool(self._device, count, nbytes)
        with self._lock:
            # Buffers of the old pool stay with the snapshots that use them until those are freed.
            self._pool = pool

    def begin(self, iteration: int) -> Room | None:
        """A buffer for a snapshot, which takes the place of one of the same iteration; nothing if none is free."""
        with self._lock:
            if iteration in self._replicas:
                self._release([iteration])
            pool = self._pool
            buffer = pool.acquire() if pool else None
        return None if pool is None or buffer is None else Room(pool, buffer)

    def add(self, header: Header, room: Room) -> None:
        """A snapshot is whole in ``room``; kept, unless a newer window was agreed on while it came."""
        with self._lock:
            if header.iteration < self.floor:
                room.give_up()
            else:
                self._replicas[header.iteration] = _Replica(Snapshot(header, room.buffer), room.pool)

    def _give_back(self, replica: _Replica) -> None:
        with self._lock:
            replica.readers -= 1
            replica.release_unless_read()

    def _release(self, iterations: list[int]) -> None:
        for iteration in iterations:
            replica = self._replicas.pop(iteration)
            replica.freed = True
            replica.release_unless_read()
