"""Copies of another rank's snapshots in this rank's host memory; they outlive the connection that brought them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import override

from moevement_core.device import Device
from moevement_core.policy.holding import superseded
from moevement_core.replication.peer_store import PeerStore
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.arena import Arena, in_pages
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease


@dataclass(slots=True, eq=False)
class _Replica:
    """A snapshot that is kept, or still read."""

    snapshot: Snapshot
    readers: int = 0
    freed: bool = False


class ReplicaStore(PeerStore):
    """The copies of one source. May be used from any thread.

    Args:
        source: the rank whose snapshots are kept.
        device: whose host memory they go to.
    """

    def __init__(self, source: int, device: Device) -> None:
        super().__init__(source)
        self.floor = NONE
        self._arena = Arena(device)
        self._promised = 0
        """Bytes that the source asked for and was given: some of them may have been given back meanwhile."""
        self._is_fitting = False
        """True if memory that turns out not to be needed is released."""
        self._replicas: dict[int, _Replica] = {}
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Host memory set aside for this source."""
        return self._arena.nbytes

    @property
    @override
    def room_bytes(self) -> int:
        return max(self._arena.nbytes, self._promised)

    def snapshots(self) -> dict[int, Snapshot]:
        """Return the kept snapshots by iteration; every one was whole when it arrived."""
        with self._lock:
            return {iteration: replica.snapshot for iteration, replica in self._replicas.items()}

    @override
    def schedules(self) -> dict[int, str]:
        return {iteration: snapshot.header.schedule for iteration, snapshot in self.snapshots().items()}

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

    def give_back(self, last: int) -> None:
        """Let go of parts that no way back needs any more, all of which end with ``SS_last`` or later."""
        with self._lock:
            held = {iteration: replica.snapshot.contents for iteration, replica in self._replicas.items()}
            for iteration, unneeded in superseded(held, last).items():
                replica = self._replicas[iteration]
                if not replica.readers:  # else it is tried again
                    replica.snapshot, ranges = replica.snapshot.without(unneeded)
                    self._arena.release_parts(replica.snapshot.buffer, ranges)

    @override
    def wait_for_room(self, nbytes: int, timeout_s: float) -> None:
        self._arena.wait_for(nbytes, timeout_s)

    def make_room(self, nbytes: int) -> None:
        """Allocate until there are ``nbytes``.

        Raises:
            RuntimeError: there is not so much memory.
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
        """Room for a snapshot, which takes the place of one of the same iteration; nothing if none is free."""
        with self._lock:
            if iteration in self._replicas:
                self._release([iteration])
        return self._arena.acquire(nbytes)

    def bring_back(self, nbytes: int) -> None:
        """Allocate so much of what was given back for a snapshot that has no room, as far as that was promised.

        Raises:
            RuntimeError: there is not so much memory.
        """
        self._arena.grow(min(self._promised, self._arena.nbytes + in_pages(nbytes)))

    def give_up(self, buffer: Buffer) -> None:
        """Nothing whole has arrived in it."""
        self._arena.release(buffer)

    def add(self, snapshot: Snapshot) -> None:
        """Add a whole snapshot; it is dropped if a newer window was agreed on while it arrived."""
        with self._lock:
            if snapshot.iteration < self.floor:
                self._arena.release(snapshot.buffer)
            else:
                self._replicas[snapshot.iteration] = _Replica(snapshot)

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
