"""Sending side of a connection: for each peer, a thread sends every snapshot and receives acknowledgements."""

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
from moevement_core.replication.wire import MESSAGE_BYTES, TO_PEER, TO_SOURCE, Message, MessageKind, checksum
from moevement_core.snapshot.blocks import blocks_of
from moevement_core.snapshot.snapshot import Header, Snapshot
from moevement_core.util.priority import lower_priority

Report = Callable[[str], None]
ATTEMPTS = 3
"""Most attempts to send a snapshot if it arrives damaged each time."""
RETRY_S = 0.05
"""Seconds until the next offer to a peer that has no free memory."""
LAST_S = 1.0
"""Seconds at the end of the job for which a sender repeats its offer to a peer that has no free memory."""
CHUNK_S = 0.01
"""Seconds that a chunk should take to send. A sender notices a pause only between chunks."""
SMALLEST_CHUNK, FIRST_CHUNK = 256 << 10, 8 << 20
"""Bytes of a chunk: least size, and size of chunks until the first snapshot is sent.

For each chunk, a thread of low priority takes the interpreter's lock. On busy processors a training thread may have to
wait until that thread releases the lock, so chunks must not be too small.
"""
STEP_S = 0.1
"""Longest single wait for a thread or an answer, in seconds.

A longer wait is divided into waits of this length, because a rank counts as hung if its main thread executes no Python
code for long.
"""


_URGENT = object()
"""Marker in a sender's queue. It wakes the sender's thread, which then sends the messages in the urgent queue."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Snapshot that a sender has to send to its peer."""

    snapshot: Snapshot
    begin: Callable[[], Snapshot | None]
    """Function that the sender calls before it reads the snapshot's buffer. It returns what to send, without parts that
    were freed; None if the whole snapshot was freed."""
    end: Callable[[], None]
    """Function that the sender calls after it has read the buffer."""


@dataclass(slots=True, eq=False)
class _Handover:
    """Whole state of this rank, which leaves, on its way to the peer."""

    snapshot: Snapshot
    ended: threading.Event
    is_kept: bool = False


class Sender:
    """Sender of snapshots to one peer, in order, on a thread of its own.

    Only :meth:`wait_for_answer`, :meth:`close` and :meth:`abandon` block their caller.

    Args:
        rank: this rank.
        peer: rank that keeps the copies.
        transport: transport to the peer.
        kept: callback that the sender's thread calls when the peer has acknowledged a snapshot.
        lost: callback for a snapshot that the peer will never have.
        report: callback that receives one sentence for each problem.
        pace: timing of sends within an iteration; None to send each snapshot at once.
        pause: pause of background work, during which the sender sends no snapshot.
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
        """Payload bytes acknowledged by the peer so far."""
        self.send_s = 0.0
        """Seconds that it took to send :attr:`sent_bytes`, pauses excluded."""
        self._paused_s = 0.0
        """Seconds of pauses so far."""
        self.gone: str | None = None
        """Reason why the sender has stopped; None while it works."""
        self._transport = transport
        self._kept = kept
        self._lost = lost
        self._report = report
        self._pace, self._pause = pace, pause or Pause()
        self.spread = Spread()
        """Choice of the rate of each send."""
        self._bytes_per_s = math.inf
        """Rate to which the connection limits sends now, in bytes per second."""
        self._payload_bytes = 0
        """Payload bytes of the newest send."""
        self.cpu_s = 0.0
        """Processor seconds of the sender's thread so far."""
        self._delivered = self._taken = self._ended = 0
        """Numbers of snapshots so far: queued, begun to send, and ended, because the peer has them or never will."""
        self._waiting_since_s: float | None = None
        self._abandoned = self._is_leaving = False
        self._answered = threading.Event()
        self.is_refused = False
        """True if the peer refused the newest request for host memory."""
        self._asks_until_s = float("inf")
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_full = False
        """True if the peer had no free memory for the newest snapshot."""
        self._urgent: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"moevement-send-{peer}", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the sender began to wait for an answer; 0 if it waits for none."""
        since = self._waiting_since_s
        return time.monotonic() - since if since is not None else 0.0

    @property
    def is_awaited(self) -> bool:
        """True if a snapshot waits for the peer: it is queued, or the peer has not acknowledged it."""
        return self._delivered > self._ended

    @property
    def backlog(self) -> int:
        """Number of messages and snapshots that wait to be sent."""
        return self._jobs.qsize()

    def open(self, nbytes: int) -> None:
        """Request ``nbytes`` bytes of the peer's host memory for all snapshots that the peer keeps for this rank.

        The sender sends this request before it offers the next snapshot.
        """
        self._say_first(Message(MessageKind.OPEN, self.rank, payload_bytes=nbytes))

    def wait_for_answer(self, timeout_s: float) -> bool:
        """Wait until the peer has answered the first :meth:`open`; return True if it has."""
        deadline_s = time.monotonic() + timeout_s
        while not self._answered.wait(STEP_S):
            if self.gone is not None or time.monotonic() > deadline_s:
                return False
        return True

    def deliver(self, delivery: Delivery) -> None:
        """Queue a snapshot for the peer; if the sender has ended, report the snapshot as lost."""
        self._delivered += 1
        self._jobs.put(delivery)
        if self.gone is not None:  # checked after queueing, because the ending thread empties the queue only once
            self._lose_queued()

    def hand_over(self, snapshot: Snapshot, timeout_s: float) -> bool:
        """Send the whole state of this rank, which leaves, and wait; return True if the peer keeps it.

        Snapshots that are queued are not sent any more, and nothing is paced: training waits for the move.

        Args:
            snapshot: dense snapshot of the state after the newest committed iteration.
            timeout_s: longest time to wait, in seconds.
        """
        handover = _Handover(snapshot, threading.Event())
        self._is_leaving = True
        self._jobs.put(handover)
        deadline_s = time.monotonic() + timeout_s
        while not handover.ended.wait(STEP_S):
            if self.gone is not None or time.monotonic() > deadline_s:
                return False
        return handover.is_kept

    def drop(self, first: int, last: int) -> None:
        """Ask the peer to drop snapshots ``first`` to ``last``.

        The sender sends this request before it offers the next snapshot.
        """
        self._say_first(Message(MessageKind.DROP, self.rank, first, count=last - first + 1))

    def _say_first(self, message: Message) -> None:
        self._urgent.put(message)
        self._jobs.put(_URGENT)

    def close(self, timeout_s: float) -> bool:
        """Send all queued snapshots and messages, then BYE; return True if all were sent in ``timeout_s`` seconds."""
        self._asks_until_s = time.monotonic() + LAST_S
        self._jobs.put(Message(MessageKind.BYE, self.rank))
        deadline_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            self._thread.join(STEP_S)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """End the thread after its connection broke. Queued snapshots are not sent, and not reported as lost."""
        self._abandoned = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        lower_priority()
        try:
            while (job := self._jobs.get()) is not None and not self._abandoned:
                self.cpu_s = time.thread_time()
                if isinstance(job, _Handover):
                    job.is_kept = self._hand_over(job.snapshot)
                    job.ended.set()
                    continue
                if isinstance(job, Delivery):
                    self._taken += 1
                    if not self._is_leaving:
                        self._deliver(job)
                    self._ended += 1
                    continue
                self._say_urgent()
                if job is _URGENT:
                    continue
                self._say(job)
                if job.kind is MessageKind.BYE:
                    return
        except Exception as error:  # training continues after any error; the log must name it
            if self._abandoned:
                return
            self.gone = (str(error).splitlines() or [type(error).__name__])[0]
            self._report(f"peer {self.peer} receives no further copies of rank {self.rank}: {self.gone}")
            self._lose_queued()

    def _open(self) -> None:
        self.is_refused = self._answer() is not MessageKind.GO
        was_answered = self._answered.is_set()
        self._answered.set()
        if self.is_refused and was_answered:  # the peer keeps the memory that it gave before
            self._report(f"peer {self.peer} refuses more host memory for the copies of rank {self.rank}")
        elif self.is_refused:
            raise ReplicationError("the peer refuses the host memory that the copies need")

    def _lose_queued(self) -> None:
        """Report every queued snapshot as lost."""
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
        except Exception:  # the thread ends and reports the error; this snapshot is no longer in the queue
            self._lost(delivery.snapshot)
            raise
        if answer is MessageKind.KEPT:
            self._kept(delivery.snapshot, self.peer)
        elif answer is not None:
            self._lost(delivery.snapshot)
            if answer is MessageKind.STALE:
                return
            self._report(
                f"peer {self.peer} does not have snapshot {delivery.snapshot.iteration} of rank {self.rank} (last "
                f"answer: {answer.name.lower()}; attempts: {ATTEMPTS if answer is MessageKind.DAMAGED else 1})"
            )

    def _attempts(self, delivery: Delivery) -> MessageKind | None:
        for _ in range(ATTEMPTS):
            if (answer := self._offer(delivery)) is not MessageKind.DAMAGED:
                break
        return answer

    def _offer(self, delivery: Delivery) -> MessageKind | None:
        """Offer a snapshot to the peer, again and again while the peer answers FULL.

        Returns:
            Last answer of the peer; None if this rank freed the snapshot before the peer had memory for it.
        """
        while not self._is_leaving and (snapshot := delivery.begin()) is not None:
            try:
                self._say_urgent()  # a full peer may have free memory after a DROP or OPEN
                began_s, paused_s = time.perf_counter(), self._paused_s
                answer = self._transfer(snapshot)
                if answer is MessageKind.KEPT:
                    seconds = time.perf_counter() - began_s - (self._paused_s - paused_s)
                    self.spread.sent(self._payload_bytes, seconds, self._bytes_per_s)
                    self.sent_bytes += snapshot.nbytes
                    self.send_s += seconds
            finally:
                delivery.end()
            # A peer frees memory when the job agrees on a newer window. At the end of the job no agreement follows.
            self.is_full = answer is MessageKind.FULL
            if answer is not MessageKind.FULL or time.monotonic() > self._asks_until_s:
                return answer
            time.sleep(RETRY_S)
        return None

    def _hand_over(self, snapshot: Snapshot) -> bool:
        self._set_rate()
        for _ in range(ATTEMPTS):
            packed, pieces = snapshot.packed()
            answer = self._announce(MessageKind.HANDOVER, snapshot.iteration, packed).kind
            if answer is MessageKind.GO:
                for piece in pieces:
                    self._transport.send(self.peer, TO_PEER, piece)
                answer = self._answer()
            if answer is not MessageKind.DAMAGED:
                break
        return answer is MessageKind.KEPT

    def _announce(self, kind: MessageKind, iteration: int, packed: Header) -> Message:
        """Send a message and a header, and return the peer's answer."""
        header = torch.frombuffer(bytearray(packed.encode()), dtype=torch.uint8)
        self._say(
            Message(
                kind=kind, rank=self.rank, iteration=iteration, header_bytes=header.numel(),
                payload_bytes=packed.payload_bytes, check=checksum(header),
            )
        )  # fmt: skip
        self._transport.send(self.peer, TO_PEER, header)
        return self._answered_by()

    def _transfer(self, snapshot: Snapshot) -> MessageKind:
        self._keep_to_pause()
        packed, pieces = snapshot.packed()
        if (answer := self._announce(MessageKind.SNAPSHOT, snapshot.iteration, packed)).kind is not MessageKind.GO:
            return answer.kind
        if answer.payload_bytes:
            pieces = self._wanted(snapshot, packed, answer)
        return self._send(pieces)

    def _wanted(self, snapshot: Snapshot, packed: Header, answer: Message) -> list[torch.Tensor]:
        """Return the memory of the blocks that the peer's parity lacks. The peer sends a flag for each block."""
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

    def _send(self, pieces: Sequence[torch.Tensor]) -> MessageKind:
        """Send ``pieces`` in chunks, and return the peer's answer.

        With a :class:`Pace` the chunks go out in idle spans of the network, otherwise at the rate that ``spread``
        chooses. In a quiet iteration the sender waits, because the job measures training without sends.
        """
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
        """Send ``pieces`` in chunks, at the rate that ``spread`` chooses; before each chunk, wait while sends pause."""
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
        """Choose the rate of the next send, limit the connection to it, and return it in bytes per second."""
        rate = math.inf if self._is_leaving else self.spread.bytes_per_s(self._delivered - self._taken)
        if rate != self._bytes_per_s:
            self._transport.pace(self.peer, TO_PEER, rate)
            self._bytes_per_s = rate
        return rate

    def _must_hurry(self) -> bool:
        """Return True if another snapshot is already in the queue, or the sender is ending."""
        return self._is_ending() or self._delivered > self._taken

    def _keep_to_pause(self) -> None:
        began_s = time.perf_counter()
        self._pause.wait(self._is_ending)
        self._paused_s += time.perf_counter() - began_s

    def _is_ending(self) -> bool:
        """Return True if the job or its generation is ending, or this rank leaves."""
        return self._abandoned or self._is_leaving or self._asks_until_s < float("inf")

    def _say_urgent(self) -> None:
        while not self._urgent.empty():
            message = self._urgent.get()
            self._say(message)
            if message.kind is MessageKind.OPEN:
                self._open()

    def _say(self, message: Message) -> None:
        self._transport.send(self.peer, TO_PEER, message.encode())

    def _answer(self) -> MessageKind:
        return self._answered_by().kind

    def _answered_by(self) -> Message:
        data = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._waiting_since_s = time.monotonic()
        try:
            self._transport.receive(self.peer, TO_SOURCE, data)
        finally:
            self._waiting_since_s = None
        return Message.decode(data)
