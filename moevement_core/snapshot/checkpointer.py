"""Sparse checkpointing of one rank: a snapshot every iteration, windows from capture to the end of their life.

A snapshot is *captured* when its copy and digests are complete, *persisted* when every peer has acknowledged it. A run
of snapshots (:mod:`moevement_core.policy.recoverable`) that is persisted on every rank of the job is the state to fall
back to; only when a newer one is, the older is freed. When no buffer is free because peers lag, the window under way is
abandoned and never the persisted one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moevement_core.device import Device
from moevement_core.errors import SnapshotError
from moevement_core.persistence.writer import WindowWriter
from moevement_core.policy.schedule import LAG_ALLOWANCE, Contents, Saved, Schedule, ScheduleHistory
from moevement_core.replication.keeper import Keeper
from moevement_core.replication.sender import STEP_S, Delivery, Sender
from moevement_core.snapshot import plain
from moevement_core.snapshot.agreement import NONE, Agreed, Agreement, Standing, Writing
from moevement_core.snapshot.copies import Capture, copy_engine
from moevement_core.snapshot.pool import BufferPool
from moevement_core.snapshot.snapshot import (
    BOUNDARY,
    Entry,
    Header,
    Lent,
    Snapshot,
    StateTensor,
    aligned_bytes,
    as_bytes,
    contents_of,
    contents_text,
    offsets,
)
from moevement_core.snapshot.whole import begin_whole
from moevement_core.strategies.strategy import Strategy

SLACK = 1.125
"""By how much buffers are larger than the heaviest slot: another order has other slots."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class OperatorState:
    """The live tensors of one operator on this rank."""

    compute: tuple[StateTensor, ...]
    full: tuple[StateTensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """What a slot of a schedule holds on this rank, and where in a buffer."""

    contents: Contents
    placed: list[tuple[StateTensor, int, Any]]
    """Tensor, offset, and its bytes as a view."""
    nbytes: int


@dataclass(slots=True, eq=False)
class _Held:
    """A buffer with a snapshot in it or on its way into it."""

    buffer: Any
    pool: BufferPool
    contents: Contents
    users: int = 1
    """Threads that read or write the buffer now; the capture is the first."""
    freed: bool = False
    snapshot: Snapshot | None = None
    """There once it is captured."""
    undeliverable: bool = False
    """A peer will never have it, so no run that needs it will be persisted."""


@dataclass(slots=True)
class Progress:
    """What checkpointing did in the last iteration, and where it stands."""

    copied_bytes: int = 0
    stall_s: float = 0.0
    copy_s: float = 0.0
    copy_cpu_s: float = 0.0
    digest_cpu_s: float = 0.0
    """Processor time of the background thread: copies of this iteration, digests of the last one."""
    replicated_bytes: int = 0
    """Payload bytes that peers acknowledged in the last iteration, all peers together."""
    lag: int = 0
    """Iterations by which the newest snapshot that all peers have trails the newest captured one."""
    whole_cpu_s: float = 0.0
    """Likewise for digests of the whole state."""
    persisted: int = NONE
    """Where the newest run begins that is persisted on every rank; ``NONE`` if there is none."""
    abandoned: int = 0
    """Windows abandoned so far."""
    memory_bytes: int = 0
    """Host memory set aside for own snapshots and for those kept for others."""
    is_winding_down: bool = False
    """Whether all ranks know that the job is to end after the iteration that begins now."""


def tensors_of(schedule: Schedule, contents: Contents, states: Mapping[str, OperatorState]) -> list[StateTensor]:
    """The live tensors that a snapshot with ``contents`` holds of ``states``."""
    tensors: list[StateTensor] = []
    for name, saved in zip(schedule.table.names, contents, strict=True):
        if (state := states.get(name)) and saved != Saved.NOTHING:
            tensors += state.full if saved == Saved.FULL else state.compute
    return tensors


def buffer_bytes(schedule: Schedule, states: Mapping[str, OperatorState], record_bytes: int) -> int:
    """Bytes of a buffer that any snapshot of ``states`` under ``schedule`` fits in, and a boundary record."""
    slots = (contents for contents in map(schedule.contents_of_slot, range(schedule.size)) if contents is not None)
    heaviest = max(aligned_bytes(tensors_of(schedule, contents, states)) for contents in slots)
    # What holds everything does so whatever the order.
    return int(heaviest * (1 if schedule.is_dense else SLACK)) + record_bytes


def _peers_with(snapshot: Snapshot, has: Mapping[int, Mapping[int, str]]) -> list[int]:
    return [peer for peer, its in has.items() if its.get(snapshot.iteration) == snapshot.header.schedule]


class Checkpointer:
    """Every method is for the training thread; each rank of the job calls :meth:`capture` once an iteration.

    Args:
        rank: this rank.
        states: live tensors of the operators that this rank holds; views that stay valid.
        strategy: what the run can come back from.
        history: the schedules that it has made; the newest one decides on buffers.
        device: where the state lives.
        senders: one for each peer.
        keepers: one for each rank whose snapshots are kept here.
        agreement: how ranks learn what all of them have.
        record_bytes: the most that a boundary record's tensors take.
        report: told, in words, what an operator should know.
        to_disk: whether there are to be buffers for windows that are being written to disk; see :meth:`write_to`.
        has: by peer, the snapshots of this rank that it has from before, taken by another process: the id of the
            schedule by iteration. One of another schedule holds other operators, and is sent anew.
        needed: first and last snapshot of the run that is persisted on every rank, where the job has one already: peers
            keep their copies of it until there is a newer one.
    """

    def __init__(
        self,
        rank: int,
        states: Mapping[str, OperatorState],
        strategy: Strategy,
        history: ScheduleHistory,
        device: Device,
        senders: Sequence[Sender],
        keepers: Sequence[Keeper],
        agreement: Agreement,
        record_bytes: int,
        report: Report,
        *,
        to_disk: bool = False,
        has: Mapping[int, Mapping[int, str]] | None = None,
        needed: tuple[int, int] = (NONE, NONE),
    ) -> None:
        self.rank = rank
        self.history = history
        self.progress = Progress()
        self.keepers = keepers
        self._former: set[int] = set()
        """Ranks among those whose snapshots are kept that have other peers now."""
        self.replicating = True
        """Whether snapshots go to peers; a benchmark that wants to know what that costs turns it off for a while."""
        self._strategy = strategy
        self._states = states
        self._device = device
        self._senders = senders
        self._has = has or {}
        self._agreement = agreement
        self._record_bytes = record_bytes
        self._report = report
        self._engine = copy_engine(device)
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._capture: Capture | None = None
        self._persisted_runs: dict[int, int] = {}
        """Runs of this rank that were said to be persisted: last snapshot by first. They may become the job's."""
        self.progress.persisted, self._last_needed = needed
        """The last snapshot of the run that is persisted on every rank."""
        self._layouts: dict[int, _Layout] = {}
        self._laid_out = ""
        self._writer: WindowWriter | None = None
        self._to_disk = to_disk
        self._paused = False
        """No snapshot is taken until there is room for a whole window."""
        self._sent_before = 0
        self._copied_bytes, self._copy_s = 0, 0.0
        self._pool = BufferPool(device, 0, 0)
        # A rank that joins takes, or is given, snapshots of schedules that were in force before, too.
        self.make_room(*history.all)

    # What buffers a schedule needs

    def memory_needed(self, schedule: Schedule) -> int:
        """Host memory of this rank's own buffers under ``schedule``; nothing that is allocated is given back."""
        count = max(schedule.slots_kept(LAG_ALLOWANCE, to_disk=self._to_disk), self._pool.count)
        return count * max(buffer_bytes(schedule, self._states, self._record_bytes), self._pool.nbytes)

    def make_room(self, *schedules: Schedule) -> None:
        """Allocate buffers for ``schedules`` if those that are there do not do; peers are asked for the same."""
        count = max(one.slots_kept(LAG_ALLOWANCE, to_disk=self._to_disk) for one in schedules)
        nbytes = max(buffer_bytes(one, self._states, self._record_bytes) for one in schedules)
        if count <= self._pool.count and nbytes <= self._pool.nbytes:
            return
        self._pool = BufferPool(self._device, max(count, self._pool.count), max(nbytes, self._pool.nbytes))
        for sender in self._senders:
            # One more: the peer learns a moment later than this rank that an old one may go.
            sender.open(self._pool.count + 1, self._pool.nbytes)

    def _layout(self, schedule: Schedule, slot: int) -> _Layout:
        """The layout of a slot, worked out once for a schedule."""
        if self._laid_out != schedule.id:
            self._layouts.clear()
            self._laid_out = schedule.id
        if slot not in self._layouts:
            contents = schedule.contents_of_slot(slot)
            assert contents is not None
            tensors = [tensor for tensor in tensors_of(schedule, contents, self._states) if tensor.nbytes]
            placed = [(tensor, at, as_bytes(tensor.tensor)) for tensor, at in offsets(tensors)]
            self._layouts[slot] = _Layout(contents, placed, aligned_bytes(tensors))
        return self._layouts[slot]

    # Once an iteration

    def capture(self, iteration: int, record: Any, *, state: int | None = None, whole: bool = False) -> None:
        """Begin ``SS_iteration``, if there is to be one, while ``state@iteration`` is live; frees what no plan needs.

        Args:
            iteration: the last one committed.
            record: boundary state and iteration record, plain data with tensors; copied before this returns (or, on a
                GPU, in the order of the current stream).
            state: the iteration whose state is live, where that is another; see :class:`Header`.
            whole: whether a digest of every operator's whole state is made, too.

        Raises:
            SnapshotError: the record is larger than was said, or an earlier copy failed.
        """
        self._learn(iteration)
        self._count_replicated()
        self._capture = None
        if iteration in self._held:
            return  # taken before a failure that the job has come back from to here
        if not self.takes(iteration):
            return
        if self._paused and not self._has_room(iteration, self.history.at(iteration)):
            return
        self._paused = False
        if not self.take(iteration, record, state=state, whole=whole):
            self._abandon(iteration)

    def takes(self, iteration: int) -> bool:
        """Whether there is to be an ``SS_iteration``."""
        return iteration >= self.history.oldest.start and self.history.contents(iteration) is not None

    def take(self, iteration: int, record: Any, *, state: int | None = None, whole: bool = False) -> bool:
        """Begin ``SS_iteration`` and say nothing to other ranks; whether a buffer was free. See :meth:`capture`.

        The schedule has to have a snapshot there.
        """
        if (buffer := self._pool.acquire()) is None:
            return False
        schedule = self.history.at(iteration)
        slot = schedule.slot(iteration)
        layout = self._layout(schedule, slot)
        marked, tensors = plain.flatten(record)
        boundary = [StateTensor(BOUNDARY, Saved.FULL, str(number), t.contiguous()) for number, t in enumerate(tensors)]
        if aligned_bytes(boundary) > self._record_bytes:
            raise SnapshotError(
                f"a boundary record of {aligned_bytes(boundary)} bytes; {self._record_bytes} were set aside for it"
            )
        placed = [*layout.placed, *((t, at, as_bytes(t.tensor)) for t, at in offsets(boundary, layout.nbytes))]
        pairs = [(source, buffer[at : at + t.nbytes]) for t, at, source in placed]
        contents = layout.contents
        held = _Held(buffer, self._pool, contents)
        everything = self._everything() if whole else {}
        with self._lock:
            self._held[iteration] = held

        def captured(done: Capture) -> None:
            entries = tuple(
                Entry(t.operator, t.saved, t.key, str(t.tensor.dtype).removeprefix("torch."), at, t.nbytes, digest)
                for (t, at, _), digest in zip(placed, done.digests, strict=True)
            )
            header = Header(
                self.rank, iteration, schedule.id, slot, contents_text(contents), entries, marked,
                iteration if state is None else state, done.whole or None,
            )  # fmt: skip
            self._captured(held, Snapshot(header, buffer))

        count = len(layout.placed)
        self._capture = self._engine.start(
            pairs[count:], pairs[:count], everything, captured, lambda: self._lose(iteration)
        )
        return True

    def adopt(self, snapshot: Snapshot) -> bool:
        """Keep a copy of ``snapshot``, which this rank's number took in another process; whether a buffer was free."""
        if snapshot.iteration in self._held or snapshot.buffer.numel() > self._pool.nbytes:
            return snapshot.iteration in self._held
        if (buffer := self._pool.acquire()) is None:
            return False
        buffer[: snapshot.buffer.numel()].copy_(snapshot.buffer)
        held = _Held(buffer, self._pool, contents_of(snapshot.header.contents))
        with self._lock:
            self._held[snapshot.iteration] = held
        self._captured(held, Snapshot(snapshot.header, buffer))
        return True

    def _everything(self) -> dict[str, list[Any]]:
        """All live tensors of every operator that has some here."""
        every = {name: [t.tensor for t in (*state.compute, *state.full)] for name, state in self._states.items()}
        return {name: tensors for name, tensors in every.items() if tensors}

    def whole_now(self) -> dict[str, str]:
        """The digest of every operator's whole live state, as a snapshot has it that was asked for it."""
        return begin_whole(self._everything())()

    @property
    def needed(self) -> tuple[int, int]:
        """First and last snapshot of the run that is persisted on every rank; ``NONE`` if there is none."""
        return self.progress.persisted, self._last_needed

    def settle(self) -> None:
        """Block until what is being captured is."""
        self._engine.settle()

    # After a failure

    def rewire(
        self,
        senders: Sequence[Sender],
        keepers: Sequence[Keeper],
        agreement: Agreement,
        has: Mapping[int, Mapping[int, str]],
        former: Collection[Keeper] = (),
    ) -> None:
        """Go on with other peers, or the same ones over new connections; every snapshot that is whole stays.

        Args:
            senders: one for each peer; they are given what their peer does not have.
            keepers: one for each rank whose snapshots are kept here.
            agreement: how ranks learn what all of them have, from now on.
            has: by peer, the snapshots of this rank that it has: the id of the schedule by iteration.
            former: keepers of ranks that have other peers now; they go when the next window is persisted.
        """
        self.settle()
        with self._lock:
            broken = [iteration for iteration, held in self._held.items() if held.snapshot is None]
        for iteration in broken:  # the failure came between the buffer and the copy
            self._lose(iteration)
        self._senders, self.keepers, self._agreement, self._has = senders, [*keepers, *former], agreement, has
        self._former = {keeper.source for keeper in former}
        self._capture, self._sent_before, self._paused = None, 0, False
        with self._lock:
            kept = sorted(self._held.items())
            for _, held in kept:
                held.undeliverable = False
                if held.snapshot is not None:
                    held.snapshot.acknowledged.clear()
                    held.snapshot.acknowledged.update(_peers_with(held.snapshot, has))
        for sender in senders:
            sender.open(self._pool.count + 1, self._pool.nbytes)
            for _, held in kept:
                if held.snapshot is not None and sender.peer not in held.snapshot.acknowledged:
                    self._deliver(sender, held, held.snapshot)

    def _deliver(self, sender: Sender, held: _Held, snapshot: Snapshot) -> None:
        sender.deliver(Delivery(snapshot, lambda: self._begin_use(held), lambda: self._end_use(held)))

    def _has_room(self, iteration: int, schedule: Schedule) -> bool:
        """Whether a window that begins now could be captured whole."""
        return schedule.may_begin_at(iteration) and self._pool.available >= schedule.snapshots

    def pause(self, iteration: int) -> None:
        """Take no ``SS_iteration``; only for measuring what snapshots cost. Replaces :meth:`capture`, on all ranks."""
        self._learn(iteration)
        self._count_replicated()
        self._capture = None

    def wait(self) -> float:
        """Before the optimizer step: block until the snapshot has left the live tensors; returns seconds of stall."""
        capture = self._capture
        self.progress.stall_s = capture.wait_copied() if capture else 0.0
        self.progress.copied_bytes = capture.nbytes if capture else 0
        self.progress.copy_s = capture.copy_s if capture else 0.0
        self.progress.copy_cpu_s = capture.copy_cpu_s if capture else 0.0
        self._copied_bytes += self.progress.copied_bytes
        self._copy_s += self.progress.copy_s
        return self.progress.stall_s

    def copy_rate(self) -> float:
        """Bytes per second that copies have reached so far; infinite before the first."""
        return self._copied_bytes / self._copy_s if self._copy_s else float("inf")

    def _captured(self, held: _Held, snapshot: Snapshot) -> None:
        """On the capture thread: hand the snapshot to the senders."""
        if not self.replicating:
            snapshot.acknowledged.update(sender.peer for sender in self._senders)
        snapshot.acknowledged.update(_peers_with(snapshot, self._has))
        with self._lock:
            held.snapshot = snapshot
        for sender in self._senders if self.replicating else ():
            if sender.peer not in snapshot.acknowledged:
                self._deliver(sender, held, snapshot)
        self._end_use(held)

    def _lose(self, iteration: int) -> None:
        """A capture failed, on whatever thread: its buffer holds nothing."""
        with self._lock:
            held = self._held.pop(iteration)
            held.freed = True
        self._end_use(held)

    # Life of a buffer

    def _begin_use(self, held: _Held) -> bool:
        with self._lock:
            if held.freed:
                return False
            held.users += 1
            return True

    def _end_use(self, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            if held.freed and held.users == 0:
                held.pool.release(held.buffer)

    def write_to(self, writer: WindowWriter | None, first: int) -> None:
        """Write windows that begin with ``SS_first`` or later to disk, once they are persisted on every rank.

        Every rank calls it at the same point. Without a writer nothing is written from now on.
        """
        self._writer, self._written_from = writer, first

    def lend(self, first: int, last: int, keepers: Sequence[Keeper]) -> list[Lent] | None:
        """Snapshots ``first`` to ``last`` of this rank and those that ``keepers`` have.

        Nothing if one is gone, or if they are not enough: right after a reorder a run of this stage may be longer.
        """
        if self._last_needed > last:
            return None
        lent: list[Lent | None] = [self._lend(iteration) for iteration in range(first, last + 1)]
        lent += [keeper.lend(iteration) for keeper in keepers for iteration in range(first, last + 1)]
        whole = [one for one in lent if one is not None]
        if len(whole) == len(lent):
            return whole
        for one in whole:
            one.give_back()
        return None

    def _lend(self, iteration: int) -> Lent | None:
        with self._lock:
            held = self._held.get(iteration)
        if held is None or held.snapshot is None or not self._begin_use(held):
            return None
        return Lent(held.snapshot, lambda: self._end_use(held))

    def _free(self, iterations: Iterable[int]) -> None:
        with self._lock:
            for iteration in list(iterations):
                held = self._held.pop(iteration)
                held.freed = True
                if held.users == 0:
                    held.pool.release(held.buffer)

    def undelivered(self, snapshot: Snapshot) -> None:
        """A peer will never have ``snapshot``; called on a sender's thread."""
        with self._lock:
            if held := self._held.get(snapshot.iteration):
                held.undeliverable = True

    def acknowledged(self, snapshot: Snapshot, peer: int) -> None:
        """A peer has all of ``snapshot``; called on a sender's thread."""
        with self._lock:
            snapshot.acknowledged.add(peer)

    # What is persisted, here and everywhere

    def snapshots(self) -> dict[int, Snapshot]:
        """This rank's own captured snapshots, by iteration."""
        with self._lock:
            return {iteration: held.snapshot for iteration, held in self._held.items() if held.snapshot}

    @property
    def oldest_needed(self) -> int:
        """Where the run begins that the job falls back to; before there is one, this rank's oldest snapshot."""
        with self._lock:
            return self.progress.persisted if self.progress.persisted != NONE else min(self._held, default=NONE)

    def persisted(self) -> dict[int, Contents]:
        """What the snapshots hold that all peers have (with no peers: that are captured)."""
        peers = {sender.peer for sender in self._senders}
        with self._lock:
            return {
                iteration: held.contents
                for iteration, held in self._held.items()
                if held.snapshot and peers <= held.snapshot.acknowledged
            }

    def _learn(self, iteration: int) -> None:
        """Take in where the job's runs stood an iteration ago, free what none of them needs, say where ours stand."""
        if agreed := self._agreement.agreed():
            self.progress.is_winding_down = agreed.is_winding_down
            self._free_unneeded(agreed)
            if self._writer is not None:
                self._writer.learn(agreed.writing)
                if self.progress.persisted >= self._written_from:
                    first = self.progress.persisted
                    self._writer.begin(first, self.history.at(first).last_of_run(first))
        points = self._strategy.restore_points(self.persisted())
        self._persisted_runs = {run.first: run.last for run in points if run.first >= self.progress.persisted}
        standing = dict.fromkeys(self._open_starts(iteration), Standing.OPEN)
        standing |= dict.fromkeys(self._persisted_runs, Standing.PERSISTED)
        self._agreement.propose(iteration, standing, self._writer.writing if self._writer else Writing.NOTHING)

    def _free_unneeded(self, agreed: Agreed) -> None:
        """Keep the newest run that is persisted everywhere, and what may still become a newer one."""
        if agreed.newest_persisted > self.progress.persisted:
            self.progress.persisted = agreed.newest_persisted
            self._last_needed = self._persisted_runs[agreed.newest_persisted]
            for keeper in self.keepers:
                keeper.free_before(self.progress.persisted)
            # Ranks that have other peers now have brought everything there.
            self.keepers = [
                keeper for keeper in self.keepers if keeper.source not in self._former or keeper.snapshots()
            ]
        first_open = agreed.first_open(after=self.progress.persisted)
        with self._lock:
            old = [held for held in self._held if held < self.progress.persisted]
            lost = [held for held in self._held if self._last_needed < held < first_open]
        self._free({*old, *lost})
        if lost:  # some rank will never have them, so no recovery can use them
            for sender in self._senders:
                sender.drop(min(lost), max(lost))

    def _open_starts(self, iteration: int) -> Iterable[int]:
        """Where runs of this rank begin that may still become persisted."""
        with self._lock:
            held = {taken: held.contents for taken, held in self._held.items() if not held.undeliverable}
        complete = {run.first for run in self._strategy.restore_points(held)}
        return complete.union(self._strategy.open_starts(held) if iteration - 1 in held else ())

    def _abandon(self, iteration: int) -> None:
        """No buffer is free: give up the window under way, and take no snapshot before a whole one has room again.

        Complete runs stay, whose delivery is only a matter of time; what lies beyond them is the window under way.
        """
        with self._lock:
            held = {taken: held.contents for taken, held in self._held.items() if not held.undeliverable}
        newest = next(self._strategy.restore_points(held), None)
        needed = max((*self._persisted_runs.values(), self._last_needed, newest.last if newest else NONE))
        under_way = sorted(taken for taken in held if taken > needed)
        self._free(under_way)
        if under_way:
            for sender in self._senders:
                sender.drop(under_way[0], under_way[-1])
        self._paused = True
        self.progress.abandoned += 1
        if self.progress.abandoned & (self.progress.abandoned - 1):  # the 1st, 2nd, 4th, 8th ... is told
            return
        waiting = ", ".join(f"{s.peer} ({s.backlog} behind)" for s in self._senders if s.backlog) or "none"
        lost = f"snapshots {under_way[0]} to {under_way[-1]}" if under_way else "no snapshot yet"
        self._report(
            f"iteration {iteration}: no host buffer is free, so the window under way ({lost}) is abandoned; the "
            f"persisted one stays. Abandoned so far: {self.progress.abandoned}. Peers that lag: {waiting}. Snapshots "
            "go on when a whole window has room"
        )

    def _count_replicated(self) -> None:
        sent = sum(sender.sent_bytes for sender in self._senders)
        self.progress.replicated_bytes, self._sent_before = sent - self._sent_before, sent
        if self._capture is not None and self._capture.finished.is_set():
            self.progress.digest_cpu_s = self._capture.digest_cpu_s
            self.progress.whole_cpu_s = self._capture.whole_cpu_s
        with self._lock:
            captured = [iteration for iteration, held in self._held.items() if held.snapshot]
        if captured:
            self.progress.lag = max(captured) - max(self.persisted(), default=min(captured) - 1)
        with self._lock:  # buffers of an older pool, until they are freed
            old = sum(held.pool.nbytes for held in self._held.values() if held.pool is not self._pool)
        kept = sum(keeper.memory_bytes for keeper in self.keepers)
        self.progress.memory_bytes = self._pool.total_bytes + old + kept

    # The end

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish copies and sends; whether all peers were done in time. Nothing may be captured afterwards."""
        self._agreement.agreed()
        self._engine.close()
        done = [sender.close(timeout_s) for sender in self._senders]
        for keeper in self.keepers:
            deadline_s = time.monotonic() + timeout_s
            while not keeper.ended.wait(STEP_S) and time.monotonic() < deadline_s:
                pass
        return all(done)
