"""Receiving side of a connection: a thread receives one rank's snapshots, checks each of them and stores it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import override

import torch

from moevement_core.comms.transport import Transport
from moevement_core.errors import SnapshotError
from moevement_core.replication.allowance import Allowance
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.replication.wire import MESSAGE_BYTES, TO_PEER, TO_SOURCE, Message, MessageKind
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Entry, Header, Snapshot
from moevement_core.util import damage
from moevement_core.util.priority import lower_priority

Report = Callable[[str], None]
PATIENCE_S = 0.2
"""Seconds that a receiver waits for free memory before it answers FULL. After this answer, the source may ask the
receiver to drop snapshots."""


class Receiver(ABC):
    """Receiver of the snapshots of one rank, the source, over one connection, with a thread of its own.

    Args:
        rank: this rank.
        store: store for the snapshots. As long as this receiver exists, no other one may use the store.
        transport: transport from the source.
        allowance: host memory of this rank. The receiver refuses a request that exceeds it.
        report: callback that receives one sentence for each refusal, and one if the receiver stops before BYE.
    """

    def __init__(self, rank: int, store: PeerStore, transport: Transport, allowance: Allowance, report: Report) -> None:
        self.store = store
        self.ended = threading.Event()
        """Event that is set once the thread has stopped: the source has sent BYE or is lost, or sent a bad message."""
        self.cpu_s = 0.0
        """Processor seconds of the receiver's thread."""
        self._rank, self._transport, self._allowance, self._report = rank, transport, allowance, report
        self._thread = threading.Thread(target=self._run, name=f"moevement-receive-{store.source}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        lower_priority()
        try:
            while (message := self._next()).kind is not MessageKind.BYE:
                self._answer_to(message)
                self._trim()
                self.cpu_s = time.thread_time()
        except SnapshotError as error:
            self._report(f"this rank refuses all further copies of rank {self.store.source}: {error}")
        except Exception as error:  # training continues after any error; the log must name it
            self._report(f"this rank receives no further copies of rank {self.store.source}: {_first_line(error)}")
        finally:
            self.ended.set()

    def _next(self) -> Message:
        data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._transport.receive(self.store.source, TO_PEER, data)
        try:
            message = Message.decode(data)
        except SnapshotError:  # the connection ends, because the position of the next message is unknown
            what, instead = f"a message of rank {self.store.source}", "that rank is ignored until ranks reconnect"
            damage.report("the checksum of a message", what, instead)
            raise
        if message.rank != self.store.source:
            raise SnapshotError(f"a message names rank {message.rank}, but only rank {self.store.source} may send here")
        return message

    def _answer_to(self, message: Message) -> None:
        match message.kind:
            case MessageKind.OPEN:
                self._say(self._open(message))
            case MessageKind.DROP:
                self.store.drop(message.iteration, message.count)
            case MessageKind.SNAPSHOT:
                self._receive(message)
            case MessageKind.HANDOVER:
                self._say(self._take_over(message), message.iteration)
            case _:
                raise SnapshotError(
                    f"expected a message OPEN, DROP, SNAPSHOT, HANDOVER or BYE, but received {message.kind.name}"
                )

    def _open(self, message: Message) -> MessageKind:
        with self.store.memory.growing:
            self.store.memory.need(self.store.source, message.payload_bytes)
            return self._make_room(message.payload_bytes)

    def _trim(self) -> None:
        """Free memory that the source no longer needs, on the receiver's thread, so that training never waits."""
        memory = self.store.memory
        with memory.growing:
            if memory.trim():
                self._allowance.keep(memory.key, memory.room_bytes)

    def _make_room(self, wanted: int) -> MessageKind:
        memory, source = self.store.memory, self.store.source
        if memory.room_bytes >= wanted:
            return MessageKind.GO  # repeated after a failure, or the same request from another member of a group
        if not self._allowance.take(memory.key, wanted):
            self._report(
                f"rank {source} requests {wanted / 1e9:.3f} GB of host memory for its copies; this rank has "
                f"{self._allowance.left_for(memory.key) / 1e9:.3f} GB left for them"
            )
            return MessageKind.REFUSED
        try:
            memory.grow(wanted)
        except RuntimeError as error:
            self._allowance.keep(memory.key, memory.room_bytes)
            self._report(f"no memory could be allocated for copies of rank {source}: {_first_line(error)}")
            return MessageKind.REFUSED
        return MessageKind.GO

    def _take_over(self, message: Message) -> MessageKind:
        """Receive the whole state of the source, which leaves its rank, and return the last answer.

        The state stays in memory of its own until the next recovery has used it.
        """
        if (data := self._header_of(message)) is None:
            return MessageKind.DAMAGED
        store, nbytes = self.store, message.payload_bytes
        try:
            header = Receiver._checked(self, Header.decode(data.numpy().tobytes()), message)
            if not self._allowance.take(store.key_of_handover, nbytes):
                raise SnapshotError(f"this rank has no {nbytes / 1e9:.3f} GB of host memory left for it")
            room = Buffer(torch.empty(nbytes, dtype=torch.uint8))
        except (SnapshotError, RuntimeError) as error:  # torch raises a RuntimeError if the host has too little memory
            self._report(f"refused the state of rank {store.source}, which leaves: {_first_line(error)}")
            return MessageKind.REFUSED
        store.handed_over = None  # an earlier state, from a recovery that was interrupted
        self._say(MessageKind.GO, message.iteration)
        for piece in room.pieces(0, nbytes):
            self._transport.receive(store.source, TO_PEER, piece)
        snapshot = Snapshot(header, room)
        if damaged := snapshot.damaged():
            self._report_damaged(header.iteration, damaged)
            return MessageKind.DAMAGED
        store.handed_over = snapshot
        return MessageKind.KEPT

    def _header_of(self, message: Message) -> torch.Tensor | None:
        """Receive the header that follows a message; return None if it was damaged on the way."""
        data = torch.empty(message.header_bytes, dtype=torch.uint8)
        self._transport.receive(self.store.source, TO_PEER, data)
        try:
            message.refuse_unless_whole(data)
        except SnapshotError:
            self._report_damaged(message.iteration, "its header", "the checksum of a header on the wire")
            return None
        return data

    def _receive(self, message: Message) -> None:
        if (data := self._header_of(message)) is None:
            self._say(MessageKind.DAMAGED, message.iteration)
            return
        if not self.store.accepts(message.iteration):  # ranks agreed on a newer window while the snapshot was sent
            self._say(MessageKind.STALE, message.iteration)
            return
        try:
            header = self._checked(Header.decode(data.numpy().tobytes()), message)
        except SnapshotError as error:
            self._report(f"refused a snapshot of rank {self.store.source}: {error}")
            self._say(MessageKind.REFUSED, message.iteration)
            return
        self._take_in(header, message)

    @abstractmethod
    def _take_in(self, header: Header, message: Message) -> None:
        """Receive the payload of a snapshot whose header was checked, and tell the source the result."""

    def _report_damaged(self, iteration: int, part: Entry | str, by: str = "the digest of a received copy") -> None:
        what = part if isinstance(part, str) else part.name
        text = f"snapshot {iteration} of rank {self.store.source} arrived damaged ({what})"
        damage.report(by, text, "this rank requests it again")  # at once, before any error that the damage causes

    def _checked(self, header: Header, message: Message) -> Header:
        store = self.store
        if header.rank != store.source or header.iteration != message.iteration:
            raise SnapshotError(
                f"its header has rank {header.rank} and iteration {header.iteration}, but rank {store.source} and "
                f"iteration {message.iteration} were announced"
            )
        if header.payload_bytes != message.payload_bytes:
            raise SnapshotError(
                f"its tensors take {header.payload_bytes} bytes, but {message.payload_bytes} were announced"
            )
        return header

    def _say(self, kind: MessageKind, iteration: int = 0) -> None:
        self._transport.send(self.store.source, TO_SOURCE, Message(kind, self._rank, iteration).encode())


class CopyReceiver(Receiver):
    """Receiver that keeps a whole copy of every snapshot."""

    store: ReplicaStore

    @override
    def _checked(self, header: Header, message: Message) -> Header:
        if header.payload_bytes > (room := self.store.memory.room_bytes):
            raise SnapshotError(
                f"it has {header.payload_bytes} bytes, but this rank has set aside only {room} bytes for all copies of "
                "that rank"
            )
        return super()._checked(header, message)

    @override
    def _take_in(self, header: Header, message: Message) -> None:
        store, memory = self.store, self.store.memory
        room = store.begin(message.iteration, message.payload_bytes)
        if room is None and memory.room_bytes > memory.arena.nbytes:
            room = self._bring_back(message)
        if room is None:
            memory.arena.wait_for(message.payload_bytes, PATIENCE_S)
            room = store.begin(message.iteration, message.payload_bytes)
        if room is None:
            self._say(MessageKind.FULL, message.iteration)
            return
        try:
            self._say(MessageKind.GO, message.iteration)
            for piece in room.pieces(0, message.payload_bytes):
                self._transport.receive(store.source, TO_PEER, piece)
        except Exception:  # the source was lost during the transfer; the next generation reuses the memory
            memory.arena.release(room)
            raise
        snapshot = Snapshot(header, room)
        if damaged := snapshot.damaged():
            memory.arena.release(room)
            self._report_damaged(header.iteration, damaged)
            self._say(MessageKind.DAMAGED, message.iteration)
            return
        store.add(snapshot)
        self._say(MessageKind.KEPT, message.iteration)

    def _bring_back(self, message: Message) -> Buffer | None:
        try:
            self.store.memory.reallocate(message.payload_bytes)
        except RuntimeError as error:
            self._report(f"no memory could be allocated for copies of rank {self.store.source}: {_first_line(error)}")
        return self.store.begin(message.iteration, message.payload_bytes)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
