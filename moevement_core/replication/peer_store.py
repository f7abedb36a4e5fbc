"""Interface of a store that keeps another rank's snapshots, as copies or in parity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from moevement_core.replication.allowance import Who
from moevement_core.replication.store_memory import StoreMemory
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease
from moevement_core.util.iterations import is_newer


class PeerStore(ABC):
    """Store of one source's snapshots, as copies or in parity. Any thread may use it.

    Args:
        source: rank whose snapshots are kept.
        memory: host memory of the store.
    """

    def __init__(self, source: int, memory: StoreMemory) -> None:
        self.source, self.memory = source, memory
        self.handed_over: Snapshot | None = None
        """Whole state of the source, which has left its rank; None unless the source has handed it to this rank."""

    @property
    def key_of_handover(self) -> Who:
        """Key of the memory of :attr:`handed_over` in the allowance."""
        return f"state of rank {self.source}"

    floor: int | None = None
    """Iteration of the oldest snapshot that the store accepts; None if it accepts any.

    A persisted window has made older snapshots useless.
    """

    def accepts(self, iteration: int) -> bool:
        """Return True if a snapshot of ``iteration`` may still be useful."""
        return not is_newer(self.floor, iteration)

    def lower_floor(self, iteration: int) -> None:
        """Accept snapshots from ``iteration`` on, even those that :attr:`floor` has excluded until now.

        Called when the job goes back to an older state. It then captures the snapshots after that state again.
        """
        if is_newer(self.floor, iteration):
            self.floor = iteration

    @abstractmethod
    def schedules(self) -> Mapping[int, str]:
        """Return the schedule id of each kept snapshot, by iteration. All kept snapshots have arrived whole."""

    @abstractmethod
    def snapshots(self) -> Mapping[int, Snapshot]:
        """Return the snapshots that have arrived whole, by iteration. Empty if the store holds parity."""

    @abstractmethod
    def lease(self, iteration: int) -> SnapshotLease | None:
        """Return ``SS_iteration`` for a reader; None if the store does not have this snapshot.

        The snapshot's memory stays unchanged until the reader releases the returned object.
        """

    @abstractmethod
    def free_before(self, iteration: int) -> None:
        """Free snapshots before ``iteration``, which no recovery needs, and refuse them from now on."""

    @abstractmethod
    def free_unneeded(self, last: int) -> None:
        """Free the parts of snapshots that no recovery needs any more.

        Args:
            last: iteration of the last snapshot of the persisted run. Every later recovery restores the
                state of this snapshot, or a newer state.
        """

    @abstractmethod
    def drop(self, first: int, count: int) -> None:
        """Free the snapshots of ``count`` iterations from ``first`` on."""
