"""The threads that bring this rank's snapshots to its peers, and that keep those of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.comms.transport import Transport
from moevement_core.device import Device
from moevement_core.engine.own import OwnSnapshots
from moevement_core.errors import ConfigError
from moevement_core.overhead.pause import Pause
from moevement_core.replication.allowance import Allowance
from moevement_core.replication.pace import Pace
from moevement_core.replication.parity.receiver import ParityReceiver
from moevement_core.replication.parity.store import GroupStore, MemberStore
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.receiver import CopyReceiver, Receiver
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.replication.sender import Sender
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.topology.topology import Topology

Copies = Mapping[int, Mapping[int, str]]
"""Snapshots that this rank keeps for others: by rank and iteration, the id of the schedule."""


class Peers:
    """Senders to, and receivers from, the peers of one rank, through all generations.

    Args:
        device: where its state lives.
        own: gives this rank's snapshots, once there are any.
        report: called with what an operator of the job should know.
        pace: says when snapshots may be sent; None: at once.
        pause: while it is on no snapshot is sent.
    """

    def __init__(
        self,
        device: Device,
        own: Callable[[], OwnSnapshots],
        report: Callable[[str], None],
        pace: Pace | None = None,
        pause: Pause | None = None,
    ) -> None:
        self.senders: list[Sender] = []
        self._device, self._own, self._report, self._pace, self._pause = device, own, report, pace, pause
        self._receiving: list[Receiver] = []
        self._counted_cpu_s = 0.0
        self._is_quiet = False
        """True if nothing has been saved since the iteration began."""

    def begin_iteration(self, *, is_saving: bool) -> None:
        """An iteration begins, beside which a snapshot is on its way or not."""
        if self._pace is not None:
            self._pace.begin(was_quiet=self._is_quiet)
        self._is_quiet = not is_saving

    def end_iteration(self, *, is_saving: bool) -> None:
        """End an iteration, beside which a snapshot was on its way or not."""
        self._is_quiet &= not is_saving

    def connect(
        self, topology: Topology, allowance: Allowance, before: Sequence[PeerStore]
    ) -> tuple[list[Sender], list[Receiver]]:
        """Start the threads of a generation.

        Args:
            topology: of it.
            allowance: host memory of this rank.
            before: what was kept of other ranks in earlier generations, the newest first.
        """
        transport = topology.channels.snapshots
        if transport is None:
            self.senders = []
            return [], []
        allowance.forget_sources(but={store.key for store in before})
        receivers = self._receivers(topology, transport, allowance, before)
        self.senders = [
            Sender(
                topology.rank, peer, transport, self._acknowledged, self._undelivered, self._report, self._pace,
                self._pause,
            )
            for peer in topology.peers[topology.rank]
        ]  # fmt: skip
        self._receiving, self._counted_cpu_s = receivers, 0.0
        return self.senders, receivers

    def spread(self, bytes_per_s: float, snapshots: int) -> None:
        """Set how fast snapshots leave from the next one on.

        Args:
            bytes_per_s: bytes of snapshots that come per second, on average; infinite while that is not known.
            snapshots: snapshots of a window.
        """
        for sender in self.senders:
            sender.spread.needed_bytes_per_s, sender.spread.usual_backlog = bytes_per_s, snapshots

    def cpu_s_since(self) -> float:
        """Return the processor seconds of threads that send and receive copies since the last call."""
        now_s = sum(sender.cpu_s for sender in self.senders) + sum(receiver.cpu_s for receiver in self._receiving)
        since_s, self._counted_cpu_s = now_s - self._counted_cpu_s, now_s
        return since_s

    def _receivers(
        self, topology: Topology, transport: Transport, allowance: Allowance, before: Sequence[PeerStore]
    ) -> list[Receiver]:
        rank, receivers = topology.rank, list[Receiver]()
        for group in topology.groups:
            if rank not in group.holders:
                continue
            kept = (
                former.group for former in before if isinstance(former, MemberStore) and former.group.group == group
            )
            store = next(kept, None) or GroupStore(group, group.holders.index(rank), self._device)
            receivers += [
                ParityReceiver(rank, MemberStore(source, store), transport, allowance, self._report)
                for source in group.members
            ]
        for source in topology.sources if not topology.groups else ():
            former_stores = (
                former for former in before if isinstance(former, ReplicaStore) and former.source == source
            )
            copies = next(former_stores, None) or ReplicaStore(source, self._device)
            receivers.append(CopyReceiver(rank, copies, transport, allowance, self._report))
        return receivers

    def refuse_without_copies(self, topology: Topology, timeout_s: float, replicas: int | None) -> None:
        """A peer that has no host memory for copies when the job starts will not have it later; every rank calls it.

        Raises:
            ConfigError: there is such a peer. On every rank.
        """
        refused = [
            sender.peer for sender in self.senders if sender.wait_for_answer(timeout_s) and sender.is_refused
        ]  # fmt: skip
        for rank, peers in enumerate(all_gather_objects(refused, list[int])):
            if peers:
                raise ConfigError(
                    f"--moevement-replicas {replicas}: rank {peers[0]} has no host memory for the copies of rank "
                    f"{rank}, as its log says; give more memory, or fewer replicas, or a larger --moevement-window"
                )

    def disconnect(self, receivers: Sequence[Receiver]) -> None:
        """Everything that talks to other ranks has been aborted: end what did it. Snapshots stay."""
        self._is_quiet = False
        for sender in self.senders:
            sender.abandon()
        for receiver in receivers:
            receiver.ended.wait()

    def _acknowledged(self, snapshot: Snapshot, peer: int) -> None:
        self._own().acknowledged(snapshot, peer)

    def _undelivered(self, snapshot: Snapshot) -> None:
        self._own().undelivered(snapshot)


def peers_have(topology: Topology, kept: Sequence[Copies]) -> dict[int, Mapping[int, str]]:
    """Returns by peer the snapshots of this rank that it keeps, from what every rank said it keeps."""
    rank = topology.rank
    if topology.groups and topology.groups_are_new:
        return {peer: {} for peer in topology.peers[rank]}
    return {peer: kept[peer].get(rank, {}) for peer in topology.peers[rank]} if kept else {}
