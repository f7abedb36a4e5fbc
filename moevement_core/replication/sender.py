"""The sending side: one thread for each peer, that brings it every snapshot and learns what it has."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moevement_core.comms.transport import Transport
from moevement_core.errors import ReplicationError
from moevement_core.overhead.pause import Pause
from moevement_core.replication.pace import Pace
from moevement_core.replication.spread import Spread
from moevement_core.replication.wire import MESSAGE_BYTES, TO_PEER, TO_SOURCE, Kind, Message, checksum
from moevement_core.snapshot.blocks import blocks_of
from moevement_core.snapshot.snapshot import Header, Snapshot
from moevement_core.util.priority import let_training_go_first

Report = Callable[[str], None]
ATTEMPTS = 3
"""Attempts to send a snapshot that arrives damaged."""
RETRY_S = 0.05
"""Seconds before the next question to a peer whose buffers are all taken."""
LAST_S = 1.0
"""Seconds for which such a peer is asked again at the end of the job."""
CHUNK_S = 0.01
"""Seconds between two looks at a pause."""
SMALLEST_CHUNK, FIRST_CHUNK = 256 << 10, 8 << 20
"""Bytes between two such looks: at least, and before anything was sent. With each look a thread of low priority takes
the interpreter's lock, and where processors are busy a training thread may wait for it to be given back."""
STEP_S = 0.1
"""Seconds of one wait for the end: a main thread that runs nothing for long counts as hanging."""


_URGENT = object()
"""Among jobs: there is something that the peer is to forget, or to have room for."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A snapshot to be brought to the peer."""

    snapshot: Snapshot
    begin: Callable[[], Snapshot | None]
    """Called before it is read; gives what is left of it, None if it was freed meanwhile."""
    end: Callable[[], None]
    """Called when it is no longer read."""


class Sender:
    """Brings snapshots to one peer, in order, on a thread of its own. Never blocks who calls it.

    Args:
        rank: this rank.
        peer: who keeps the copies.
        transport: the way there.
        kept: called on the sender's thread when the peer has acknowledged a snapshot.
        lost: called when the peer will never have one.
        report: called, in words, with what goes wrong.
        pace: says when snapshots may be sent; None: at once.
        pause: while it is on no snapshot is sent.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        transport: Transport,
        kept: Callable[[Snapshot, int], None],
        lost: Callable[[Snapshot], None],
        report: Report,
        pace: Pace | None = None,
        pause: Pause | None = None,
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.sent_bytes = 0
        """Payload bytes acknowledged so far."""
        self.send_s = 0.0
        """Seconds that sending them took, without pauses."""
        self._paused_s = 0.0
        """Seconds of pauses so far."""
        self.gone: str | None = None
        """Why nothing is sent any more."""
        self._transport = transport
        self._kept = kept
        self._lost = lost
        self._report = report
        self._pace, self._pause = pace, pause or Pause()
        self.spread = Spread()
        """Rate at which snapshots leave."""
        self._bytes_per_s = math.inf
        """Rate that the connection has."""
        self._payload_bytes = 0
        """Bytes of the newest send."""
        self.cpu_s = 0.0
        """Processor seconds of the sender's thread."""
        self._delivered = self._taken = 0
        """Snapshots that were to be brought so far, and those of them that the thread has begun with."""
        self._waiting_since_s: float | None = None
        self._abandoned = False
        self._answered = threading.Event()
        self.is_refused = False
        """True if the peer has no host memory for copies."""
        self._asks_until_s = float("inf")
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_full = False
        """True if the peer has no room for the next snapshot yet."""
        self._urgent: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"moevement-send-{peer}", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds for which an answer has been due, 0 if none is."""
        since = self._waiting_since_s
        return time.monotonic() - since if since is not None else 0.0

    @property
    def backlog(self) -> int:
        """Messages that wait to be sent."""
        return self._jobs.qsize()

    def open(self, nbytes: int) -> None:
        """Ask the peer for ``nbytes`` for all that it keeps at a time; before it is offered any other snapshot."""
        self._say_first(Message(Kind.OPEN, self.rank, payload_bytes=nbytes))

    def wait_for_answer(self, timeout_s: float) -> bool:
        """Wait until the peer has answered the first :meth:`open`; whether it has."""
        deadline_s = time.monotonic() + timeout_s
        while not self._answered.wait(STEP_S):
            if self.gone is not None or time.monotonic() > deadline_s:
                return False
        return True

    def deliver(self, delivery: Delivery) -> None:
        """Queue a snapshot for the peer."""
        self._delivered += 1
        self._jobs.put(delivery)
        if self.gone is not None:  # asked after queueing, so that none slips in behind the thread's last look
            self._lose_queued()

    def drop(self, first: int, last: int) -> None:
        """Tell the peer to forget snapshots ``first`` to ``last``, before it is offered any other."""
        self._say_first(Message(Kind.DROP, self.rank, first, count=last - first + 1))

    def _say_first(self, message: Message) -> None:
        self._urgent.put(message)
        self._jobs.put(_URGENT)

    def close(self, timeout_s: float) -> bool:
        """Bring what is queued, say goodbye; whether that was done in time."""
        self._asks_until_s = time.monotonic() + LAST_S
        self._jobs.put(Message(Kind.BYE, self.rank))
        deadline_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            self._thread.join(STEP_S)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """End the thread, whose connection is broken; what is queued stays unsent and is nobody's loss."""
        self._abandoned = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        let_training_go_first()
        try:
            while (job := self._jobs.get()) is not None and not self._abandoned:
                self.cpu_s = time.thread_time()
                if isinstance(job, Delivery):
                    self._taken += 1
                    self._deliver(job)
                    continue
                self._say_urgent()
                if job is _URGENT:
                    continue
                self._say(job)
                if job.kind is Kind.BYE:
                    return
        except Exception as error:  # whatever it is, training goes on and somebody must learn of it
            if self._abandoned:
                return
            self.gone = (str(error).splitlines() or [type(error).__name__])[0]
            self._report(f"peer {self.peer} keeps no more copies of rank {self.rank}: {self.gone}")
            self._lose_queued()

    def _open(self) -> None:
        self.is_refused = self._answer() is not Kind.GO
        was_answered = self._answered.is_set()
        self._answered.set()
        if self.is_refused and was_answered:  # what it gave before stays
            self._report(f"peer {self.peer} has no more host memory for copies of rank {self.rank} than it gave")
        elif self.is_refused:
            raise ReplicationError("it refuses the host memory that the copies need")

    def _lose_queued(self) -> None:
        """Nothing that was to be sent will be."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if isinstance(job, Delivery):
                self._lost(job.snapshot)

    def _deliver(self, delivery: Delivery) -> None:
        try:
            answer = self._attempts(delivery)
        except Exception:  # ends the thread, which reports it; this snapshot is no longer in its queue
            self._lost(delivery.snapshot)
            raise
        if answer is Kind.KEPT:
            self._kept(delivery.snapshot, self.peer)
        elif answer is not None:
            self._lost(delivery.snapshot)
            if answer is Kind.STALE:
                return
            self._report(
                f"peer {self.peer} does not have snapshot {delivery.snapshot.iteration} of rank {self.rank}: "
                f"{answer.name.lower()} after {ATTEMPTS if answer is Kind.DAMAGED else 1} attempts"
            )

    def _attempts(self, delivery: Delivery) -> Kind | None:
        for _ in range(ATTEMPTS):
            if (answer := self._offer(delivery)) is not Kind.DAMAGED:
                break
        return answer

    def _offer(self, delivery: Delivery) -> Kind | None:
        """Make one attempt; return None if the snapshot was freed before it could be sent."""
        while (snapshot := delivery.begin()) is not None:
            try:
                self._say_urgent()  # a peer that is full may have room then
                began_s, paused_s = time.perf_counter(), self._paused_s
                answer = self._transfer(snapshot)
                if answer is Kind.KEPT:
                    seconds = time.perf_counter() - began_s - (self._paused_s - paused_s)
                    self.spread.sent(self._payload_bytes, seconds, self._bytes_per_s)
                    self.sent_bytes += snapshot.nbytes
                    self.send_s += seconds
            finally:
                delivery.end()
            # The peer frees memory when the job agrees on a newer window, which at its end it never will.
            self.is_full = answer is Kind.FULL
            if answer is not Kind.FULL or time.monotonic() > self._asks_until_s:
                return answer
            time.sleep(RETRY_S)
        return None

    def _transfer(self, snapshot: Snapshot) -> Kind:
        self._keep_to_pause()
        packed, pieces = snapshot.packed()
        header = torch.frombuffer(bytearray(packed.encode()), dtype=torch.uint8)
        self._say(
            Message(
                Kind.SNAPSHOT, self.rank, snapshot.iteration, header.numel(), packed.payload_bytes,
                check=checksum(header),
            )
        )  # fmt: skip
        self._transport.send(self.peer, TO_PEER, header)
        if (answer := self._answered_by()).kind is not Kind.GO:
            return answer.kind
        if answer.payload_bytes:
            pieces = self._wanted(snapshot, packed, answer)
        return self._send(pieces)

    def _wanted(self, snapshot: Snapshot, packed: Header, answer: Message) -> list[torch.Tensor]:
        """Return the blocks that are not yet in the parity to which the snapshot is added."""
        flags = torch.empty(answer.payload_bytes, dtype=torch.uint8)
        self._transport.receive(self.peer, TO_SOURCE, flags)
        answer.refuse_unless_whole(flags)
        pieces: list[torch.Tensor] = []
        held = iter(snapshot.in_order())
        for block, is_wanted in zip(blocks_of(packed), flags.tolist(), strict=True):
            for entry in itertools.islice(held, len(block)):
                if is_wanted:
                    pieces += snapshot.buffer.pieces(entry.offset, entry.nbytes)
        return pieces

    def _send(self, pieces: Sequence[torch.Tensor]) -> Kind:
        """Send in chunks, at once or when the network is idle, but not beside a quiet iteration."""
        if self._pace is None:
            self._send_spread(pieces)
            return self._answer()
        began_s, waited_s, left = time.perf_counter(), 0.0, sum(piece.numel() for piece in pieces)
        self._payload_bytes = nbytes = left
        for piece in pieces:
            at = 0
            while at < piece.numel():
                asked_s = time.perf_counter()
                self._keep_to_pause()
                count = min(self._pace.allowed(left, self._must_hurry), piece.numel() - at)
                waited_s += time.perf_counter() - asked_s
                self._transport.send(self.peer, TO_PEER, piece[at : at + count])
                at, left = at + count, left - count
        answer = self._answer()
        self._pace.sent(nbytes, time.perf_counter() - began_s - waited_s)
        return answer

    def _send_spread(self, pieces: Sequence[torch.Tensor]) -> None:
        """Send at the rate that is set, in chunks that keep to a pause."""
        rate = self._set_rate()
        usual = self.sent_bytes / self.send_s if self.send_s else math.inf
        least = max(SMALLEST_CHUNK, self._transport.parallel_bytes)
        size = FIRST_CHUNK if math.isinf(usual) else max(least, int(min(rate, usual) * CHUNK_S))
        self._payload_bytes = sum(piece.numel() for piece in pieces)
        for piece in pieces:
            for chunk in piece.split(size):
                self._keep_to_pause()
                self._transport.send(self.peer, TO_PEER, chunk)

    def _set_rate(self) -> float:
        """Set the rate of the connection, where it is another one than before, and return it."""
        rate = self.spread.bytes_per_s(self._delivered - self._taken)
        if rate != self._bytes_per_s:
            self._transport.pace(self.peer, TO_PEER, rate)
            self._bytes_per_s = rate
        return rate

    def _must_hurry(self) -> bool:
        """Return whether the next snapshot, or the end, waits."""
        return self._is_ending() or self._delivered > self._taken

    def _keep_to_pause(self) -> None:
        began_s = time.perf_counter()
        self._pause.wait(self._is_ending)
        self._paused_s += time.perf_counter() - began_s

    def _is_ending(self) -> bool:
        """Return whether the job or its generation ends."""
        return self._abandoned or self._asks_until_s < float("inf")

    def _say_urgent(self) -> None:
        while not self._urgent.empty():
            message = self._urgent.get()
            self._say(message)
            if message.kind is Kind.OPEN:
                self._open()

    def _say(self, message: Message) -> None:
        self._transport.send(self.peer, TO_PEER, message.encode())

    def _answer(self) -> Kind:
        return self._answered_by().kind

    def _answered_by(self) -> Message:
        data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._waiting_since_s = time.monotonic()
        try:
            self._transport.receive(self.peer, TO_SOURCE, data)
        finally:
            self._waiting_since_s = None
        return Message.decode(data)
