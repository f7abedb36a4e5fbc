"""Threads that send this rank's snapshots to its peers, and that receive snapshots of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moevement_core.comms.exchange import all_gather_objects, receive_object, send_object
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
from moevement_core.topology.topology import Topology

Copies = Mapping[int, Mapping[int, str]]
"""Snapshots that one rank keeps for other ranks: maps owner and iteration to the id of the snapshot's schedule."""


class Peers:
    """Threads of one rank that send and receive snapshots, through all generations.

    Args:
        device: device that holds the rank's state.
        own: snapshots of this rank.
        report: function that logs a line for the people who run the job.
        pace: object that finds times when training leaves the network idle, and lets senders send only then. None to
            send at any time.
        pause: switch that holds back all sends during some iterations, so that the job can measure training without
            saving.
    """

    def __init__(
        self,
        device: Device,
        own: OwnSnapshots,
        report: Callable[[str], None],
        pace: Pace | None = None,
        pause: Pause | None = None,
    ) -> None:
        self.senders: list[Sender] = []
        self._device, self._own, self._report, self._pace, self._pause = device, own, report, pace, pause
        self._receiving: list[Receiver] = []
        self._counted_cpu_s = 0.0
        self._is_quiet = False
        """True if no snapshot was copied or sent since the iteration began."""

    def begin_iteration(self, *, is_saving: bool) -> None:
        """Begin an iteration; ``is_saving`` is True if a snapshot is being copied, sent or written as it begins."""
        if self._pace is not None:
            self._pace.begin(was_quiet=self._is_quiet)
        self._is_quiet = not is_saving

    def end_iteration(self, *, is_saving: bool) -> None:
        """End an iteration; ``is_saving`` is True if a snapshot was copied, sent or written during the iteration."""
        self._is_quiet &= not is_saving

    def connect(
        self, topology: Topology, allowance: Allowance, before: Sequence[PeerStore]
    ) -> tuple[list[Sender], list[Receiver]]:
        """Start the threads of a generation.

        Args:
            topology: topology of the generation.
            allowance: host memory that this rank may use.
            before: stores of other ranks' snapshots from earlier generations, the newest first.

        Returns:
            Senders to all peers, and receivers from all ranks whose snapshots this rank keeps.
        """
        transport = topology.channels.snapshots
        if transport is None:
            self.senders = []
            return [], []
        allowance.forget_sources(but={store.memory.key for store in before})
        receivers = self._receivers(topology, transport, allowance, before)
        self.senders = [
            Sender(
                rank=topology.rank, peer=peer, transport=transport, kept=self._own.acknowledged,
                lost=self._own.undelivered, report=self._report, pace=self._pace, pause=self._pause,
            )
            for peer in topology.peers[topology.rank]
        ]  # fmt: skip
        self._receiving, self._counted_cpu_s = receivers, 0.0
        return self.senders, receivers

    def spread(self, bytes_per_s: float, snapshots: int) -> None:
        """Tell the senders how fast they must send, from the next snapshot on.

        Args:
            bytes_per_s: bytes per second at which this rank captures snapshots, on average; infinite if unknown.
            snapshots: number of snapshots of a window.
        """
        for sender in self.senders:
            sender.spread.needed_bytes_per_s, sender.spread.usual_backlog = bytes_per_s, snapshots

    def cpu_s_since(self) -> float:
        """Return the processor seconds that senders and receivers have used since the last call."""
        now_s = sum(sender.cpu_s for sender in self.senders) + sum(receiver.cpu_s for receiver in self._receiving)
        since_s, self._counted_cpu_s = now_s - self._counted_cpu_s, now_s
        return since_s

    def _receivers(
        self, topology: Topology, transport: Transport, allowance: Allowance, before: Sequence[PeerStore]
    ) -> list[Receiver]:
        rank, stores, receivers = topology.rank, self._stores(topology, before), list[Receiver]()
        for memory in {store.memory for store in stores}:
            if memory.room_bytes:
                allowance.keep(memory.key, memory.room_bytes)
        for store in stores:
            if isinstance(store, MemberStore):
                receivers.append(ParityReceiver(rank, store, transport, allowance=allowance, report=self._report))
            else:
                receivers.append(CopyReceiver(rank, store, transport, allowance=allowance, report=self._report))
        return receivers

    def _stores(self, topology: Topology, before: Sequence[PeerStore]) -> list[MemberStore | ReplicaStore]:
        """Return a store for each rank whose snapshots this rank keeps, from an earlier generation if there is one."""
        rank, stores = topology.rank, list[MemberStore | ReplicaStore]()
        for group in topology.groups:
            if rank not in group.holders:
                continue
            kept = (
                former.group for former in before if isinstance(former, MemberStore) and former.group.group == group
            )
            parity = next(kept, None) or GroupStore(group, group.holders.index(rank), self._device)
            stores += [MemberStore(source, parity) for source in group.members]
        for source in topology.sources if not topology.groups else ():
            former_stores = (
                former for former in before if isinstance(former, ReplicaStore) and former.source == source
            )
            stores.append(next(former_stores, None) or ReplicaStore(source, self._device))
        return stores

    def refuse_without_copies(self, topology: Topology, timeout_s: float, replicas: int | None) -> None:
        """Refuse to start a job in which a peer has no host memory for copies. Every rank calls it.

        Args:
            topology: topology of the first generation.
            timeout_s: seconds to wait for the answer of a peer.
            replicas: value of ``--moevement-replicas``, for the message.

        Raises:
            ConfigError: a peer has refused copies. Every rank raises it.
        """
        refused = [
            sender.peer for sender in self.senders if sender.wait_for_answer(timeout_s) and sender.is_refused
        ]  # fmt: skip
        for rank, peers in enumerate(all_gather_objects(refused, list[int])):
            if peers:
                raise ConfigError(
                    f"--moevement-replicas {replicas}: rank {peers[0]} has no host memory for the copies of rank "
                    f"{rank}, and logs the reason; give more memory, fewer replicas, or a larger --moevement-window"
                )

    def disconnect(self, receivers: Sequence[Receiver]) -> None:
        """End senders and receivers after an abort of all communication. Snapshots stay in memory."""
        self._is_quiet = False
        for sender in self.senders:
            sender.abandon()
        for receiver in receivers:
            receiver.ended.wait()


def ask_peers(topology: Topology, keeps: Copies) -> dict[int, Mapping[int, str]]:
    """Return the snapshots of this rank that each peer keeps. Every rank calls it when it rejoins a running job.

    Each rank tells the ranks whose snapshots it keeps, and no others.

    Args:
        topology: topology of the generation.
        keeps: snapshots that this rank keeps for other ranks; empty on a replacement.
    """
    peers = topology.peers[topology.rank]
    if (transport := topology.channels.messages) is None:
        return {}
    for source in topology.sources:
        send_object(transport, source, dict(keeps.get(source, {})))
    has = {peer: receive_object(transport, peer, dict[int, str]) for peer in peers}
    return {peer: {} for peer in peers} if topology.groups and topology.groups_are_new else has
