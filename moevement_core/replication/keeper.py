"""The receiving side: copies of other ranks' snapshots in this rank's host memory, checked before they count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moevement_core.device import Device
from moevement_core.errors import SnapshotError
from moevement_core.replication.allowance import Allowance
from moevement_core.replication.transport import Transport
from moevement_core.replication.wire import MESSAGE_BYTES, TO_PEER, TO_SOURCE, Kind, Message
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.pool import BufferPool
from moevement_core.snapshot.snapshot import Header, Lent, Snapshot

Report = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Kept:
    """A snapshot that is kept, or still read."""

    snapshot: Snapshot
    pool: BufferPool
    readers: int = 0
    freed: bool = False

    def release_unless_read(self) -> None:
        if self.freed and not self.readers:
            self.pool.release(self.snapshot.buffer)


class Keeper:
    """Keeps the snapshots of one source. A thread of its own receives; other methods may be called from any thread.

    Args:
        rank: this rank.
        source: the rank whose snapshots are kept.
        transport: where they come from.
        device: whose host memory they go to.
        allowance: host memory for the copies of all sources here; what goes beyond it is refused.
        report: told, in words, what is refused and when the source is gone.
        before: the keeper of the same source over a connection that is broken; what it has is taken over.
    """

    def __init__(
        self,
        rank: int,
        source: int,
        transport: Transport,
        device: Device,
        allowance: Allowance,
        report: Report,
        before: Keeper | None = None,
    ) -> None:
        self.rank = rank
        self.source = source
        self.ended = threading.Event()
        """The source said goodbye or is gone."""
        self._transport = transport
        self._device = device
        self._allowance = allowance
        self._report = report
        self._pool: BufferPool | None = None
        self._kept: dict[int, _Kept] = {}
        self._floor = NONE
        self._lock = threading.Lock()
        if before is not None:
            before.ended.wait()
            self._pool, self._kept, self._floor, self._lock = before._pool, before._kept, before._floor, before._lock
            allowance.keep(source, self.memory_bytes)
        self._thread = threading.Thread(target=self._run, name=f"moevement-keep-{source}", daemon=True)
        self._thread.start()

    @property
    def memory_bytes(self) -> int:
        """Host memory set aside for this source."""
        return self._pool.total_bytes if self._pool else 0

    def snapshots(self) -> dict[int, Snapshot]:
        """What is kept now, by iteration; every one was whole when it came."""
        with self._lock:
            return {iteration: kept.snapshot for iteration, kept in self._kept.items()}

    def lend(self, iteration: int) -> Lent | None:
        """A snapshot that is kept, whose buffer stays as it is until it is given back; nothing if there is none."""
        with self._lock:
            kept = self._kept.get(iteration)
            if kept is None:
                return None
            kept.readers += 1
            return Lent(kept.snapshot, lambda: self._give_back(kept))

    def _give_back(self, kept: _Kept) -> None:
        with self._lock:
            kept.readers -= 1
            kept.release_unless_read()

    def free_before(self, iteration: int) -> None:
        """Let go of snapshots that no recovery needs any more, and refuse such ones from now on."""
        with self._lock:
            self._floor = max(self._floor, iteration)
            self._release([kept for kept in self._kept if kept < iteration])

    def _release(self, iterations: list[int]) -> None:
        for iteration in iterations:
            kept = self._kept.pop(iteration)
            kept.freed = True
            kept.release_unless_read()

    def _run(self) -> None:
        try:
            while (message := self._next()).kind is not Kind.BYE:
                self._answer_to(message)
        except SnapshotError as error:
            self._report(f"copies of rank {self.source} are refused from now on: {error}")
        except Exception as error:  # whatever it is, training goes on and somebody must learn of it
            self._report(f"rank {self.source}, whose snapshots are kept here, is gone: {_first_line(error)}")
        finally:
            self.ended.set()

    def _next(self) -> Message:
        data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._transport.receive(self.source, TO_PEER, data)
        message = Message.decode(data)
        if message.rank != self.source:
            raise SnapshotError(f"a message of rank {message.rank} where rank {self.source} speaks")
        return message

    def _answer_to(self, message: Message) -> None:
        match message.kind:
            case Kind.OPEN:
                self._say(self._open(message))
            case Kind.DROP:
                with self._lock:
                    end = message.iteration + message.count
                    self._release([kept for kept in self._kept if message.iteration <= kept < end])
            case Kind.SNAPSHOT:
                self._receive(message)
            case _:
                raise SnapshotError(f"an unexpected {message.kind.name}")

    def _open(self, message: Message) -> Kind:
        wanted = message.count * message.payload_bytes
        if self._pool is not None and (self._pool.count, self._pool.nbytes) == (message.count, message.payload_bytes):
            return Kind.GO  # asked anew after a failure
        if not self._allowance.take(self.source, wanted):
            self._report(
                f"rank {self.source} asks for {wanted / 1e9:.3f} GB of host memory for its copies; "
                f"{self._allowance.left_for(self.source) / 1e9:.3f} GB are allowed here"
            )
            return Kind.REFUSED
        try:
            pool = BufferPool(self._device, message.count, message.payload_bytes)
        except RuntimeError as error:
            self._allowance.keep(self.source, self.memory_bytes)
            self._report(f"no host memory for the copies of rank {self.source}: {_first_line(error)}")
            return Kind.REFUSED
        with self._lock:
            # Buffers of the old pool stay with the snapshots that use them until those are freed.
            self._pool = pool
        return Kind.GO

    def _receive(self, message: Message) -> None:
        data = torch.empty(message.header_bytes, dtype=torch.uint8)
        self._transport.receive(self.source, TO_PEER, data)
        try:
            header = self._checked(Header.decode(data.numpy().tobytes()), message)
        except SnapshotError as error:
            self._report(f"refused a snapshot of rank {self.source}: {error}")
            self._say(Kind.REFUSED, message.iteration)
            return
        with self._lock:
            if message.iteration in self._kept:
                self._release([message.iteration])
            pool = self._pool
            buffer = pool.acquire() if pool else None
        if pool is None or buffer is None:
            self._say(Kind.FULL, message.iteration)
            return
        try:
            self._say(Kind.GO, message.iteration)
            self._transport.receive(self.source, TO_PEER, buffer[: message.payload_bytes])
        except Exception:  # the source is gone in the middle of it; another generation uses the buffer again
            pool.release(buffer)
            raise
        snapshot = Snapshot(header, buffer)
        if damaged := snapshot.damaged():
            pool.release(buffer)
            self._report(
                f"snapshot {header.iteration} of rank {self.source} arrived damaged ({damaged.key} of "
                f"{damaged.operator or 'the boundary record'}); asked for it again"
            )
            self._say(Kind.DAMAGED, message.iteration)
            return
        with self._lock:
            if header.iteration < self._floor:  # a newer window was agreed on while it came
                pool.release(buffer)
            else:
                self._kept[header.iteration] = _Kept(snapshot, pool)
        self._say(Kind.KEPT, message.iteration)

    def _checked(self, header: Header, message: Message) -> Header:
        if header.rank != self.source or header.iteration != message.iteration:
            raise SnapshotError(
                f"its header says rank {header.rank}, iteration {header.iteration}; rank {self.source}, iteration "
                f"{message.iteration} was announced"
            )
        if header.iteration < self._floor:
            raise SnapshotError(f"iteration {header.iteration} is stale; a window from {self._floor} on is persisted")
        if header.payload_bytes != message.payload_bytes:
            raise SnapshotError(f"its tensors take {header.payload_bytes} bytes; {message.payload_bytes} are announced")
        if self._pool is None or header.payload_bytes > self._pool.nbytes:
            agreed = self._pool.nbytes if self._pool else 0
            raise SnapshotError(f"it has {header.payload_bytes} bytes; at most {agreed} were agreed on")
        return header

    def _say(self, kind: Kind, iteration: int = 0) -> None:
        self._transport.send(self.source, TO_SOURCE, Message(kind, self.rank, iteration).encode())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
