"""Copies: this rank's snapshots on their way to its peers, and those of other ranks that are kept here."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from moevement_core.engine.own import Copies, Held, OwnSnapshots, peers_with
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.receiver import Receiver
from moevement_core.replication.sender import STEP_S, Delivery, Sender
from moevement_core.snapshot.snapshot import Snapshot


class Replicator:
    """Of one rank; for the training thread, but :meth:`replicate`.

    Args:
        own: this rank's snapshots.
        senders: one for each peer.
        receivers: one for each rank whose snapshots are kept here.
        has: what peers have from before, of another process that had this rank.
    """

    def __init__(
        self, own: OwnSnapshots, senders: Sequence[Sender], receivers: Sequence[Receiver], has: Copies
    ) -> None:
        self.enabled = True
        """Whether snapshots go to peers; a benchmark that wants to know what that costs turns it off for a while."""
        self.receivers = receivers
        self.stores: list[PeerStore] = [receiver.store for receiver in receivers]
        """What is kept of other ranks: of those that have this one for a peer, and of some that had."""
        self._own, self._senders, self._has = own, senders, has
        self._former: set[PeerStore] = set()
        """Those of ranks that have other peers now."""
        self._counted_bytes = 0

    @property
    def peers(self) -> set[int]:
        """Ranks that keep copies of this one's snapshots."""
        return {sender.peer for sender in self._senders}

    @property
    def memory_bytes(self) -> int:
        """Host memory set aside for copies of other ranks' snapshots."""
        return sum(store.memory_bytes for store in self.stores)

    def open(self, nbytes: int) -> None:
        """Ask every peer for so much room."""
        for sender in self._senders:
            sender.open(nbytes)

    def had_by(self, snapshot: Snapshot) -> list[int]:
        """Peers that need not be sent ``snapshot``."""
        return peers_with(snapshot, self._has) if self.enabled else sorted(self.peers)

    def replicate(self, held: Held) -> None:
        """Bring a snapshot to every peer that does not have it; called on the capture thread."""
        snapshot = held.snapshot
        assert snapshot is not None
        for sender in self._senders if self.enabled else ():
            if sender.peer not in snapshot.acknowledged:
                sender.deliver(
                    Delivery(snapshot, lambda: self._own.begin_use(held), lambda: self._own.end_use(held))
                )  # fmt: skip

    def drop(self, first: int, last: int) -> None:
        """Peers need not keep these of this rank's snapshots."""
        for sender in self._senders:
            sender.drop(first, last)

    def free(self, first: int, last: int | None) -> bool:
        """No way back begins before ``SS_first``, or ends before ``SS_last``; None: that is not known.

        Ranks that have other peers now have brought everything there; returns whether what was kept of some is gone.
        """
        for store in self.stores:
            store.free_before(first)
            if last is not None:
                store.give_back(last)
        before = len(self.stores)
        self.stores = [store for store in self.stores if store not in self._former or store.schedules()]
        return len(self.stores) < before

    def rewire(
        self, senders: Sequence[Sender], receivers: Sequence[Receiver], has: Copies, former: Collection[PeerStore]
    ) -> None:
        """Other peers, or the same ones over new connections; see :meth:`Checkpointer.rewire`."""
        self._senders, self._has, self.receivers = senders, has, receivers
        self.stores = [*(receiver.store for receiver in receivers), *former]
        self._former = set(former)
        self._counted_bytes = 0

    def sent_since(self) -> int:
        """Payload bytes that peers acknowledged since the last call."""
        sent = sum(sender.sent_bytes for sender in self._senders)
        since, self._counted_bytes = sent - self._counted_bytes, sent
        return since

    @property
    def are_full(self) -> bool:
        """Whether a peer has no room for the next snapshot until older ones go."""
        return any(sender.is_full for sender in self._senders)

    def backlog(self) -> str:
        """Peers that lag, in words."""
        return ", ".join(f"{one.peer} ({one.backlog} behind)" for one in self._senders if one.backlog) or "none"

    def close(self, timeout_s: float) -> bool:
        """Finish what is on its way; whether all peers were done in time."""
        done = [sender.close(timeout_s) for sender in self._senders]
        for receiver in self.receivers:
            deadline_s = time.monotonic() + timeout_s
            while not receiver.ended.wait(STEP_S) and time.monotonic() < deadline_s:
                pass
        return all(done)
