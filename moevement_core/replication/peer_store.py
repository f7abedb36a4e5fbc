"""Store of what a rank keeps for another one, as copies or in parity, for all users but its receiver."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from moevement_core.replication.allowance import Who
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease


class PeerStore(ABC):
    """Store of one source. May be used from any thread.

    Args:
        source: the rank whose snapshots are kept.
    """

    def __init__(self, source: int) -> None:
        self.source = source
        self.growing = threading.Lock()
        """Held by who finds that there is too little room until there is more."""

    @property
    def key(self) -> Who:
        """Purpose under which its memory is allowed."""
        return self.source

    floor: int = NONE
    """Older snapshots are stale."""

    def lower_floor(self, iteration: int) -> None:
        """Take snapshots from ``iteration`` on again: the source goes back to what is older than those it had."""
        self.floor = min(self.floor, iteration)

    def is_part_of(self, others: Collection[PeerStore]) -> bool:
        """Return whether one of ``others`` uses the same memory."""
        return self in others

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Host memory set aside for this source."""

    @property
    def room_bytes(self) -> int:
        """Host memory that the source may count on, allocated or to be allocated when a snapshot comes."""
        return self.memory_bytes

    @abstractmethod
    def schedules(self) -> Mapping[int, str]:
        """Return the id of the schedule of each kept snapshot, by iteration; every one was whole when it arrived."""

    @abstractmethod
    def snapshots(self) -> Mapping[int, Snapshot]:
        """Return the snapshots that can be handed out, by iteration."""

    @abstractmethod
    def lease(self, iteration: int) -> SnapshotLease | None:
        """Return one of them, whose memory stays unchanged until it is released; None if there is none."""

    @abstractmethod
    def free_before(self, iteration: int) -> None:
        """Let go of snapshots that no recovery needs any more, and refuse such ones from now on."""

    @abstractmethod
    def give_back(self, last: int) -> None:
        """Let go of parts that no way back needs any more, all of which end with ``SS_last`` or later."""

    @abstractmethod
    def drop(self, first: int, count: int) -> None:
        """Let go of ``count`` iterations from ``first`` on."""

    @abstractmethod
    def wait_for_room(self, nbytes: int, timeout_s: float) -> None:
        """Wait until so much is free, but no longer than that."""

    @abstractmethod
    def make_room(self, nbytes: int) -> None:
        """Allocate until there are ``nbytes``.

        Raises:
            RuntimeError: there is not so much memory.
        """

    @abstractmethod
    def need(self, nbytes: int) -> None:
        """Note that the source needs ``nbytes`` from now on, and no more."""

    @abstractmethod
    def trim(self) -> bool:
        """Give back some of what nobody needs and what is free; return whether any went. Call it again and again."""
