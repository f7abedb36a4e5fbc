"""Host memory that one rank's snapshots may use, on the rank itself and on its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moevement_core.engine.config import FEWEST_COPIES
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.own import OwnSnapshots
from moevement_core.engine.replicator import Replicator
from moevement_core.policy.schedule import Schedule, is_other_window
from moevement_core.replication.allowance import OWN, Allowance


class Room:
    """Host memory that is set aside for snapshots; it grows and shrinks with the windows of the job.

    Every method is for the training thread.

    Args:
        memory: computation of the host memory that this rank's snapshots need.
        own: snapshots of this rank.
        replicator: connections to peers, which set memory aside when asked.
        allowance: host memory that this rank may use.
        report: function that is called with each warning for the users of the job.
        newest: newest schedule of the job.
        may_give_up_own: True if own snapshots that all peers hold may be dropped when host memory is used up.
        give_up_log: function that frees the given number of bytes of the boundary log; without a log it does nothing.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        own: OwnSnapshots,
        replicator: Replicator,
        allowance: Allowance,
        report: Callable[[str], None],
        newest: Schedule,
        *,
        may_give_up_own: bool,
        give_up_log: Callable[[int], object],
    ) -> None:
        self._memory, self._own, self._replicator, self._allowance = memory, own, replicator, allowance
        self._report = report
        self._may_give_up_own, self._give_up_log = may_give_up_own, give_up_log
        self.asked_bytes = 0
        """Bytes of host memory that this rank has last requested from each peer."""
        self._fitted: Schedule | None = newest
        """Schedule to whose windows the memory is fitted; None while windows of another size have memory, too."""
        self._fitting: Schedule | None = None
        """Schedule whose windows keep their memory while :meth:`fit` frees the rest; None while it frees nothing."""

    def make(self, *schedules: Schedule) -> None:
        """Set host memory aside, here and at peers, for windows of ``schedules``, which follow each other.

        If this rank had enough memory for them before and has given a part back, it allocates that part again only when
        a snapshot needs it.
        """
        at_peer = self._memory.at_peer(schedules)
        if self._memory.here(schedules) > self._allowance.of(OWN):
            self._grow(lambda: self._memory.here(schedules), at_peer)
        else:
            self._ask_peers(at_peer)

    def make_for_kept(self, kept: Sequence[Schedule]) -> None:
        """Set host memory aside for every schedule whose snapshots this rank may still keep or capture again.

        The rank has given back the memory of schedules whose windows ended before the persisted run.

        Args:
            kept: these schedules, the oldest first.
        """
        if any(is_other_window(schedule, kept[-1]) for schedule in kept):
            self._fitted = None
        self.make(*kept)

    def make_beside(self, persisted_bytes: int, schedule: Schedule) -> None:
        """Set host memory aside for a new run of snapshots beside the persisted run, after a snapshot was left out.

        Args:
            persisted_bytes: bytes that the persisted run takes.
            schedule: schedule of the new run.
        """
        memory, beside = self._memory, self._memory.beside(persisted_bytes, schedule)

        def here() -> int:  # _grow() calls this again after it has dropped own snapshots
            return max(memory.here_after_gap(schedule), beside if memory.keeps_own_copies else 0)

        self._grow(here, max(memory.at_peer_after_gap(schedule), beside))

    def may_begin(self, schedule: Schedule, iteration: int) -> bool:
        """Return True if a window may begin at ``iteration`` and memory for all of it is free."""
        is_run_start = (iteration - schedule.start) % schedule.cadence.run_start == 0
        return is_run_start and self._own.arena.available >= self._memory.window_here(schedule)

    def fit(self, kept: Sequence[Schedule]) -> None:
        """Give back a part of the memory that only earlier windows needed, if they had another size than the newest.

        Called every iteration. Peers also give back memory. If peers never lagged, this rank gives back its memory for
        lag as well, but the allowance still reserves it. After a mere reorder of operators, the method gives nothing
        back, because the next reorder would need the memory, and page-locking it again takes time.

        Args:
            kept: schedules whose snapshots this rank may still keep or capture again, the oldest first.
        """
        newest = kept[-1]
        if self._fitted is not None and not is_other_window(newest, self._fitted):
            return
        if any(is_other_window(newest, schedule) for schedule in kept):
            return
        # Computed for each schedule alone: memory for a left-out snapshot between two of them is set aside when needed.
        here = max(self._memory.here([schedule]) for schedule in kept)
        at_peer = max(self._memory.at_peer([schedule]) for schedule in kept)
        arena = self._own.arena
        if self._fitting is None or is_other_window(newest, self._fitting):
            arena.watch()
            if at_peer < self.asked_bytes:
                self.asked_bytes = at_peer
                self._replicator.open(at_peer)
            self._fitting = newest
        may_go = arena.fit(here)
        self._allowance.keep(OWN, max(here, arena.nbytes))
        if not may_go:
            self._fitted, self._fitting = newest, None

    def ask_peers_again(self) -> None:
        """Request over new connections the memory that this rank has last requested from each peer."""
        self._replicator.open(self.asked_bytes)

    def _grow(self, here: Callable[[], int], at_peer: int) -> None:
        """Set host memory aside on this rank and at each peer.

        If this rank has too little, own copies are dropped first, then the oldest iterations of the boundary log.

        Args:
            here: function that returns the bytes needed on this rank; called again after each drop, which may lower the
                need.
            at_peer: bytes needed at each peer.
        """
        if not self._set_aside(here()):
            self._give_up_own()
        if not self._set_aside(here()):
            self._give_up_log(int(here() - self._allowance.left_for(OWN)))
            self._set_aside(here())
        self._ask_peers(at_peer)

    def _ask_peers(self, nbytes: int) -> None:
        if nbytes > self.asked_bytes:
            self.asked_bytes = nbytes
            self._replicator.open(nbytes)

    def _set_aside(self, nbytes: int) -> bool:
        """Allocate ``nbytes`` of host memory for own snapshots; return False if the budget or the host has less."""
        arena = self._own.arena
        if nbytes <= arena.nbytes:
            return True
        if not self._allowance.take(OWN, nbytes):
            return False
        try:
            arena.grow(nbytes)
        except RuntimeError as error:
            self._allowance.keep(OWN, arena.nbytes)
            self._report(f"host memory for snapshots cannot be allocated: {str(error).splitlines()[0]}")
            return False
        return True

    def _give_up_own(self) -> None:
        """Drop own copies that all peers hold, and keep none from now on, if the flags allow it."""
        peers = self._replicator.peers
        if not self._may_give_up_own or not self._memory.keeps_own_copies or len(peers) < FEWEST_COPIES:
            return
        self._memory.keeps_own_copies = False
        count = self._own.leave_to(frozenset(peers))
        self._report(
            f"host memory is used up ({self._allowance.total_bytes / 1e9:.3f} GB), so this rank drops each of its own "
            f"snapshots when all peers have it; it dropped {count} of them now"
        )
