"""Snapshots that this rank captured. A freed snapshot keeps its buffer until no thread reads the buffer any more."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moevement_core.policy.holding import superseded
from moevement_core.policy.schedule import Contents
from moevement_core.snapshot.arena import Arena
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease

Copies = Mapping[int, Mapping[int, str]]
"""Schedule ids of this rank's snapshots that peers hold, by peer and iteration."""


@dataclass(slots=True, eq=False)
class HeldBuffer:
    """Buffer of one snapshot that is captured or still being copied."""

    iteration: int
    buffer: Buffer
    contents: Contents
    at_peers: Contents
    """Contents of the copies on peers, for all ranks of the stage. They may have fewer operators than ``contents``."""
    users: int = 1
    """Number of users of the buffer: its capture, other threads that read or write it, and leases of the snapshot."""
    freed: bool = False
    snapshot: Snapshot | None = None
    """Captured snapshot; None while it is being copied."""
    undeliverable: bool = False
    """True if a peer will never have the snapshot. No run with this snapshot can then be persisted."""
    dropped: bool = False
    """True if this rank freed the buffer because peers hold the snapshot; :attr:`snapshot` keeps the header."""

    def holds(self, snapshot: Snapshot) -> bool:
        """Return True if ``snapshot`` was captured into this buffer, even if a part of it has been freed since."""
        return self.snapshot is not None and self.snapshot.acknowledged is snapshot.acknowledged

    @property
    def is_here(self) -> bool:
        """True if the snapshot is captured and its buffer can be read."""
        return self.snapshot is not None and not self.dropped


class OwnSnapshots:
    """Snapshots that one rank captured, and the users of their buffers. Any thread may call any method.

    Args:
        arena: memory in which the snapshots are.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.keepers: frozenset[int] | None = None
        """Peers that must all hold a snapshot before this rank drops its own copy.

        None: this rank keeps its own copies.
        """
        self._lock = threading.Lock()
        self._held: dict[int, HeldBuffer] = {}
        self._read: set[HeldBuffer] = set()
        """Freed snapshots whose buffers are still in use."""

    def __contains__(self, iteration: int) -> bool:
        return iteration in self._held

    def __iter__(self) -> Any:
        with self._lock:
            return iter(sorted(self._held))

    def add(self, held: HeldBuffer) -> HeldBuffer:
        """Register a snapshot, and return it. While it is being copied, its capture is the buffer's first user."""
        with self._lock:
            self._held[held.iteration] = held
        return held

    def captured(self, held: HeldBuffer, snapshot: Snapshot, acked_by: Iterable[int]) -> None:
        """Record that ``snapshot`` is captured, and that the peers in ``acked_by`` hold it already."""
        snapshot.acknowledged.update(acked_by)
        with self._lock:
            held.snapshot = snapshot

    def begin_use(self, held: HeldBuffer) -> Snapshot | None:
        """Register a reader of the buffer; return the snapshot, or None if it was freed or dropped before this call."""
        with self._lock:
            if held.freed or not held.is_here:
                return None
            held.users += 1
            return held.snapshot

    def end_use(self, held: HeldBuffer, *, has_failed: bool = False) -> None:
        """Unregister a user of the buffer. Release the buffer if the snapshot is freed and this was the last user.

        Args:
            held: the buffer.
            has_failed: True if the user was the snapshot's capture, and has failed. The snapshot is then freed, unless
                the training thread has freed it already.
        """
        with self._lock:
            if has_failed and not held.freed:
                del self._held[held.iteration]
                held.freed = True
            held.users -= 1
            if held.freed and held.users == 0:
                self._read.discard(held)
                self.arena.release(held.buffer)
            elif held.freed:
                self._read.add(held)
            self._drop_if_kept_elsewhere(held)

    def free(self, iterations: Iterable[int]) -> None:
        """Free snapshots that nothing needs; a buffer with readers is released when the last reader ends."""
        with self._lock:
            for iteration in list(iterations):
                held = self._held.pop(iteration)
                held.freed = True
                if held.users == 0:
                    self.arena.release(held.buffer)
                else:
                    self._read.add(held)

    def free_unneeded(self, last: int) -> None:
        """Free parts of snapshots that no restore point needs.

        The method skips a snapshot that has readers; the caller repeats the call in the next iteration.

        Args:
            last: iteration of the last snapshot of the persisted run.
        """
        with self._lock:
            here = {iteration: held.contents for iteration, held in self._held.items() if held.is_here}
            for iteration, operators in superseded(here, last).items():
                held = self._held[iteration]
                if held.snapshot is not None and not held.users:
                    held.snapshot, ranges = held.snapshot.without(operators)
                    held.contents = held.at_peers = held.snapshot.contents
                    self.arena.release_parts(held.buffer, ranges)

    def lease(self, iteration: int) -> SnapshotLease | None:
        """Return a lease of ``SS_iteration``, which keeps its buffer unchanged; None without this snapshot."""
        with self._lock:
            held = self._held.get(iteration)
        if held is None or (snapshot := self.begin_use(held)) is None:
            return None
        return SnapshotLease(snapshot, lambda: self.end_use(held))

    def acknowledged(self, snapshot: Snapshot, peer: int) -> None:
        """Record that ``peer`` has all of ``snapshot``."""
        with self._lock:
            snapshot.acknowledged.add(peer)

            if (held := self._held.get(snapshot.iteration)) and held.holds(snapshot):
                self._drop_if_kept_elsewhere(held)

    def leave_to(self, keepers: frozenset[int]) -> int:
        """Drop each snapshot that all ``keepers`` hold, now and from now on; return the number of those dropped now."""
        with self._lock:
            self.keepers = keepers
            return sum(self._drop_if_kept_elsewhere(held) for held in self._held.values())

    def _drop_if_kept_elsewhere(self, held: HeldBuffer) -> bool:
        if self.keepers is None or held.users or held.freed or held.dropped or held.snapshot is None:
            return False
        if is_kept := self.keepers <= held.snapshot.acknowledged:
            held.dropped = True
            self.arena.release(held.buffer)
        return is_kept

    def undelivered(self, snapshot: Snapshot) -> None:
        """Record that a peer will never have ``snapshot``."""
        with self._lock:
            if (held := self._held.get(snapshot.iteration)) and held.holds(snapshot):
                held.undeliverable = True

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """Return the captured snapshots that this rank still has, by iteration."""
        with self._lock:
            every = self._held.items()
            return {iteration: held.snapshot for iteration, held in every if held.snapshot and held.is_here}

    @property
    def buffers(self) -> list[Buffer]:
        """Return the buffers of all snapshots, including freed snapshots that some thread still reads."""
        with self._lock:
            return [held.buffer for held in (*self._held.values(), *self._read)]

    def deliverable(self, peers: Collection[int]) -> dict[int, Contents]:
        """Return the snapshots that all ``peers`` have or may still receive.

        Returns:
            What peers receive of each snapshot, by iteration; the whole contents if there are no peers.
        """
        with self._lock:
            return {
                iteration: held.at_peers if peers else held.contents
                for iteration, held in self._held.items()
                if not held.undeliverable
            }

    def acked_by(self, peers: Collection[int]) -> dict[int, Contents]:
        """Return what all ``peers`` hold of each snapshot; what was captured if there are no peers.

        Returns:
            What peers hold of each snapshot, by iteration; the whole contents if there are no peers.
        """
        wanted = set(peers)
        with self._lock:
            return {
                iteration: held.at_peers if wanted else held.contents
                for iteration, held in self._held.items()
                if held.snapshot and wanted <= held.snapshot.acknowledged
            }

    def forget_peers(self, has: Copies) -> list[HeldBuffer]:
        """Replace the acknowledgements of all snapshots by ``has``, because the rank gets new connections to peers.

        Snapshots whose capture was interrupted are lost.

        Args:
            has: snapshots that the peers of the new generation hold.

        Returns:
            Captured snapshots that this rank still has, oldest first.
        """
        with self._lock:
            broken = [held for held in self._held.values() if held.snapshot is None]
        for held in broken:
            self.free([held.iteration])
            self.end_use(held)
        with self._lock:
            kept = [held for _, held in sorted(self._held.items())]
            for held in kept:
                held.undeliverable = False
                if held.snapshot is not None:
                    held.snapshot.acknowledged.clear()
                    held.snapshot.acknowledged.update(peers_with(held.snapshot, has))
                    held.undeliverable = held.dropped and not has.keys() <= held.snapshot.acknowledged
                self._drop_if_kept_elsewhere(held)
        return [held for held in kept if not held.dropped]


def peers_with(snapshot: Snapshot, has: Copies) -> list[int]:
    """Return the peers that hold ``snapshot``.

    Snapshots of another schedule hold other operators, so they are ignored.
    """
    return [peer for peer, schedules in has.items() if schedules.get(snapshot.iteration) == snapshot.header.schedule]
