"""Replication of one rank: its snapshots on their way to peers, and the copies that it keeps for other ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from moevement_core.engine.own import Copies, HeldBuffer, OwnSnapshots, peers_with
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.receiver import Receiver
from moevement_core.replication.sender import STEP_S, Delivery, Sender
from moevement_core.snapshot.agreement import HORIZON
from moevement_core.snapshot.snapshot import Snapshot


class Replicator:
    """Senders and receivers of one rank.

    Every method is for the training thread. The capture thread also calls :meth:`acked_by` and :meth:`replicate`.

    Args:
        own: snapshots of this rank.
        senders: one sender for each peer.
        receivers: one receiver for each rank whose snapshots this rank keeps.
        has: snapshots that peers hold already, captured by an earlier process of this rank.
    """

    def __init__(
        self, own: OwnSnapshots, senders: Sequence[Sender], receivers: Sequence[Receiver], has: Copies
    ) -> None:
        self.enabled = True
        """True if snapshots are sent to peers. A benchmark sets it to False for a while to measure what sends cost."""
        self.withheld: frozenset[int] = frozenset()
        """Iterations of snapshots that are kept, but not sent to peers that lack them."""
        self.receivers = receivers
        self.stores: list[PeerStore] = [receiver.store for receiver in receivers]
        """Stores with the copies that this rank keeps for other ranks, also for ranks that now have other peers."""
        self._own, self._senders, self._has = own, senders, has
        self._former: set[PeerStore] = set()
        """Stores with copies for ranks that now have other peers; see :meth:`free`."""
        self._counted_bytes = 0

    @property
    def peers(self) -> set[int]:
        """Ranks that keep copies of this rank's snapshots."""
        return {sender.peer for sender in self._senders}

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory set aside for copies of other ranks' snapshots."""
        return sum(memory.arena.nbytes for memory in {store.memory for store in self.stores})

    def open(self, nbytes: int) -> None:
        """Ask every peer to set ``nbytes`` of host memory aside for this rank's snapshots."""
        for sender in self._senders:
            sender.open(nbytes)

    def acked_by(self, snapshot: Snapshot) -> list[int]:
        """Return the peers that hold ``snapshot``; all peers if replication is off, so that no run waits for peers."""
        return peers_with(snapshot, self._has) if self.enabled else sorted(self.peers)

    def replicate(self, held: HeldBuffer) -> None:
        """Queue a snapshot for every peer that has not acknowledged it."""
        snapshot = held.snapshot
        assert snapshot is not None
        for sender in self._senders if self.enabled else ():
            if sender.peer not in snapshot.acknowledged:
                sender.deliver(Delivery(snapshot, lambda: self._begin_use(held), lambda: self._own.end_use(held)))

    def _begin_use(self, held: HeldBuffer) -> Snapshot | None:
        if held.snapshot is not None and held.snapshot.iteration in self.withheld:
            return None
        snapshot = self._own.begin_use(held)
        return None if snapshot is None else snapshot.for_peers()

    def drop(self, first: int, last: int) -> None:
        """Ask every peer to drop this rank's snapshots from ``first`` to ``last``."""
        for sender in self._senders:
            sender.drop(first, last)

    def forget_after(self, iteration: int) -> None:
        """Drop the copies of snapshots after ``iteration`` on all ranks, because iterations are executed anew."""
        # Peers may hold snapshots of this rank's predecessor; all of them drop these now.
        self._has = {
            peer: {at: schedule for at, schedule in copies.items() if at <= iteration}
            for peer, copies in self._has.items()
        }
        for store in self.stores:
            store.drop(iteration + 1, HORIZON)

    def drop_copies(self, first: int, last: int) -> None:
        """Free the copies of other ranks' snapshots from ``first`` to ``last``."""
        for store in self.stores:
            store.drop(first, last - first + 1)

    def free(self, first: int, last: int | None) -> bool:
        """Free those parts of copies for other ranks that no restore point needs.

        If another rank now has other peers, this method removes that rank's store as soon as the store is empty. By
        then, the new peers hold all snapshots that the job needs.

        Args:
            first: the first snapshot of the persisted run. No restore point begins earlier.
            last: the last snapshot of that run. The stores free a part of a snapshot if a later snapshot, up to
                ``last``, has the operator's full state. None: they free only whole snapshots.

        Returns:
            True if a store was removed.
        """
        for store in self.stores:
            store.free_before(first)
            if last is not None:
                store.free_unneeded(last)
        before = len(self.stores)
        self.stores = [store for store in self.stores if store not in self._former or store.schedules()]
        return len(self.stores) < before

    def rewire(
        self, senders: Sequence[Sender], receivers: Sequence[Receiver], has: Copies, former: Collection[PeerStore]
    ) -> None:
        """Replace all senders and receivers after a failure; see :meth:`Checkpointer.rewire`."""
        self._senders, self._has, self.receivers = senders, has, receivers
        self.stores = [*(receiver.store for receiver in receivers), *former]
        self._former = set(former)
        self._counted_bytes = 0

    def sent_since(self) -> int:
        """Return the payload bytes that peers acknowledged since the last call."""
        sent = sum(sender.sent_bytes for sender in self._senders)
        since, self._counted_bytes = sent - self._counted_bytes, sent
        return since

    @property
    def are_full(self) -> bool:
        """True if a peer has no memory for the next snapshot until it frees older ones."""
        return any(sender.is_full for sender in self._senders)

    def backlog(self) -> str:
        """Return the peers that lag, with the number of messages that wait for each, as text."""
        return (
            ", ".join(f"{sender.peer} ({sender.backlog} behind)" for sender in self._senders if sender.backlog)
            or "none"
        )

    def close(self, timeout_s: float) -> bool:
        """Finish all sends; return True if every sender was done within ``timeout_s`` seconds."""
        done = [sender.close(timeout_s) for sender in self._senders]
        for receiver in self.receivers:
            deadline_s = time.monotonic() + timeout_s
            while not receiver.ended.wait(STEP_S) and time.monotonic() < deadline_s:
                pass
        return all(done)
