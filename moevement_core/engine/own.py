"""This rank's own snapshots: each has a buffer from the beginning of its copy until nobody needs or reads it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moevement_core.policy.schedule import Contents
from moevement_core.snapshot.arena import Arena
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease

Copies = Mapping[int, Mapping[int, str]]
"""By peer, the snapshots of this rank that it has: the id of the schedule by iteration."""


@dataclass(slots=True, eq=False)
class Held:
    """A buffer with a snapshot in it or on its way into it."""

    iteration: int
    buffer: Buffer
    contents: Contents
    users: int = 1
    """Threads that read or write the buffer now; the capture is the first."""
    freed: bool = False
    snapshot: Snapshot | None = None
    """There once it is captured."""
    undeliverable: bool = False
    """A peer will never have it, so no run that needs it will be persisted."""
    dropped: bool = False
    """Peers have it, and this rank no more; :attr:`snapshot` says what it was."""

    def is_of(self, snapshot: Snapshot) -> bool:
        """Whether ``snapshot`` is what was captured here, given back in part meanwhile or not."""
        return self.snapshot is not None and self.snapshot.acknowledged is snapshot.acknowledged

    @property
    def is_here(self) -> bool:
        """Whether all that is left of it can be read."""
        return self.snapshot is not None and not self.dropped


class OwnSnapshots:
    """May be used from any thread.

    Args:
        arena: whose memory they are in.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.keepers: frozenset[int] | None = None
        """Peers that keep all copies there are: what they all have is dropped here. None: it is kept here, too."""
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._read: set[Held] = set()
        """Those that are freed and whose memory is still in use."""

    def __contains__(self, iteration: int) -> bool:
        return iteration in self._held

    def __iter__(self) -> Any:
        with self._lock:
            return iter(sorted(self._held))

    def begin(self, iteration: int, buffer: Buffer, contents: Contents) -> Held:
        """A snapshot is on its way into ``buffer``, which has one user now: who copies."""
        held = Held(iteration, buffer, contents)
        with self._lock:
            self._held[iteration] = held
        return held

    def captured(self, held: Held, snapshot: Snapshot, had_by: Iterable[int]) -> None:
        """It is there; some peers have it from before."""
        snapshot.acknowledged.update(had_by)
        with self._lock:
            held.snapshot = snapshot

    def lose(self, iteration: int) -> None:
        """A capture failed: its buffer holds nothing."""
        with self._lock:
            held = self._held.pop(iteration)
            self._read.add(held)
            held.freed = True
        self.end_use(held)

    def begin_use(self, held: Held) -> Snapshot | None:
        """Read the buffer from now on; returns what there is in it, None if it was freed meanwhile."""
        with self._lock:
            if held.freed or not held.is_here:
                return None
            held.users += 1
            return held.snapshot

    def end_use(self, held: Held) -> None:
        """It is no longer read or written."""
        with self._lock:
            held.users -= 1
            if held.freed and held.users == 0:
                self._read.discard(held)
                self.arena.release(held.buffer)
            self._drop_if_kept_elsewhere(held)

    def free(self, iterations: Iterable[int]) -> None:
        """Nobody needs these; their buffers go when nobody reads them."""
        with self._lock:
            for iteration in list(iterations):
                held = self._held.pop(iteration)
                held.freed = True
                if held.users == 0:
                    self.arena.release(held.buffer)
                else:
                    self._read.add(held)

    def give_back(self, gone: Mapping[int, npt.NDArray[np.bool_]]) -> None:
        """Parts that nobody needs, by iteration bool ``[operators]``; where somebody reads, it is tried again later."""
        with self._lock:
            for iteration, operators in gone.items():
                held = self._held.get(iteration)
                if held is None or held.snapshot is None or held.users or held.dropped:
                    continue
                held.snapshot, ranges = held.snapshot.without(operators)
                held.contents = held.snapshot.contents
                self.arena.release_parts(held.buffer, ranges)

    def lease(self, iteration: int) -> SnapshotLease | None:
        """A snapshot whose buffer stays as it is until it is given back; nothing if there is none."""
        with self._lock:
            held = self._held.get(iteration)
        if held is None or (snapshot := self.begin_use(held)) is None:
            return None
        return SnapshotLease(snapshot, lambda: self.end_use(held))

    def acknowledged(self, snapshot: Snapshot, peer: int) -> None:
        """A peer has all of ``snapshot``."""
        with self._lock:
            snapshot.acknowledged.add(peer)

            if (held := self._held.get(snapshot.iteration)) and held.is_of(snapshot):
                self._drop_if_kept_elsewhere(held)

    def drop_kept_elsewhere(self, peers: Collection[int]) -> int:
        """Let go of what all ``peers`` have; returns how many snapshots that were."""
        with self._lock:
            wanted = [one for one in self._held.values() if one.is_here and not one.users]
            gone = [one for one in wanted if one.snapshot and set(peers) <= one.snapshot.acknowledged]
            for held in gone:
                self._drop(held)
            return len(gone)

    def know_of(self, snapshot: Snapshot, peers: Iterable[int]) -> None:
        """One that ``peers`` have, and that this rank need not keep itself."""
        known = Snapshot(snapshot.header, Buffer(), set(peers))
        with self._lock:
            self._held[snapshot.iteration] = Held(
                snapshot.iteration, known.buffer, snapshot.contents, users=0, snapshot=known, dropped=True
            )

    def _drop_if_kept_elsewhere(self, held: Held) -> None:
        if self.keepers is None or held.users or held.freed or not held.is_here:
            return
        assert held.snapshot is not None
        if self.keepers <= held.snapshot.acknowledged:
            self._drop(held)

    def _drop(self, held: Held) -> None:
        held.dropped = True
        self.arena.release(held.buffer)

    def undelivered(self, snapshot: Snapshot) -> None:
        """A peer will never have ``snapshot``."""
        with self._lock:
            if held := self._held.get(snapshot.iteration):
                held.undeliverable = True

    def snapshots(self) -> dict[int, Snapshot]:
        """What is captured and still here, by iteration."""
        with self._lock:
            every = self._held.items()
            return {iteration: held.snapshot for iteration, held in every if held.snapshot and held.is_here}

    def buffers(self) -> list[Buffer]:
        """All that are in use, or still read."""
        with self._lock:
            return [held.buffer for held in (*self._held.values(), *self._read)]

    def contents(self) -> dict[int, Contents]:
        """What those hold."""
        with self._lock:
            return {iteration: held.contents for iteration, held in self._held.items() if held.is_here}

    def deliverable(self) -> dict[int, Contents]:
        """What those hold, captured or on their way, that every peer may still have."""
        with self._lock:
            return {iteration: held.contents for iteration, held in self._held.items() if not held.undeliverable}

    def had_by(self, peers: Collection[int]) -> dict[int, Contents]:
        """What those hold that all ``peers`` have; with no peers, that are captured."""
        wanted = set(peers)
        with self._lock:
            return {
                iteration: held.contents
                for iteration, held in self._held.items()
                if held.snapshot and wanted <= held.snapshot.acknowledged
            }

    def forget_peers(self, has: Copies) -> list[Held]:
        """Other peers are there from now on, which have these; returns what is captured, the oldest first.

        What was interrupted between its buffer and the end of its copy is lost.
        """
        with self._lock:
            broken = [iteration for iteration, held in self._held.items() if held.snapshot is None]
        for iteration in broken:
            self.lose(iteration)
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
    """Those that have ``snapshot``. One of another schedule holds other operators, and is sent again."""
    return [peer for peer, its in has.items() if its.get(snapshot.iteration) == snapshot.header.schedule]
