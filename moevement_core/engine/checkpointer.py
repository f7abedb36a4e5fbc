"""Sparse checkpointing of one rank: a snapshot every iteration, from its capture to the end of its life.

The parts know little of each other: what is copied (``capture.py``), whose memory is in use (``own.py``), what has to
be kept (``lifetime.py``), where copies go (``replicator.py``), windows on disk (``persistence/writer.py``). Here they
are put together, once an iteration, in the order that makes them safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from moevement_core.device import Device, Event
from moevement_core.engine.capture import Capturer
from moevement_core.engine.config import FEWEST_COPIES
from moevement_core.engine.layout import OperatorState
from moevement_core.engine.lifetime import Lifetime
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.own import Copies, Held, OwnSnapshots
from moevement_core.engine.progress import Progress
from moevement_core.engine.replicator import Replicator
from moevement_core.overhead.pause import Pause
from moevement_core.persistence.writer import WindowWriter
from moevement_core.policy.holding import superseded
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Schedule, ScheduleHistory, is_other_window
from moevement_core.replication.allowance import OWN, Allowance
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.receiver import Receiver
from moevement_core.replication.sender import Sender
from moevement_core.snapshot.agreement import HORIZON, NONE, Agreement, Writing
from moevement_core.snapshot.arena import Arena
from moevement_core.snapshot.snapshot import Snapshot, SnapshotLease
from moevement_core.strategies.strategy import Strategy

Report = Callable[[str], None]
PATIENCE_S = 30.0
"""How long the first snapshots of a run, or those taken again in a recovery, wait for peers."""
STEP_S = 0.005


class Checkpointer:
    """Every method is for the training thread; each rank of the job calls :meth:`capture` once an iteration.

    Args:
        rank: this rank.
        states: live tensors of the operators that this rank holds; views that stay valid.
        strategy: what the run can be restored from.
        history: the schedules that it has made; the newest one decides on buffers.
        device: where the state lives.
        senders: one for each peer.
        receivers: one for each rank whose snapshots are kept here.
        agreement: how ranks learn what all of them have.
        memory: what snapshots of this rank take.
        allowance: what this rank may use.
        report: called, in words, with what an operator should know.
        has: by peer, the snapshots of this rank that it has from before, taken by another process: the id of the
            schedule by iteration. One of another schedule holds other operators, and is sent again.
        needed: first and last snapshot of the run that is persisted on every rank, where the job has one already: peers
            keep their copies of it until there is a newer one.
        pause: while it is on no digest is made of what was copied.
    """

    def __init__(
        self,
        rank: int,
        states: Mapping[str, OperatorState],
        strategy: Strategy,
        history: ScheduleHistory,
        device: Device,
        senders: Sequence[Sender],
        receivers: Sequence[Receiver],
        agreement: Agreement,
        memory: SnapshotMemory,
        allowance: Allowance,
        report: Report,
        *,
        has: Copies | None = None,
        needed: tuple[int, int] = (NONE, NONE),
        pause: Pause | None = None,
    ) -> None:
        self.history, self.memory = history, memory
        self.own = OwnSnapshots(Arena(device))
        self._keep_where_said([sender.peer for sender in senders])
        self.replicator = Replicator(self.own, senders, receivers, has or {})
        self.capturer = Capturer(rank, states, self.own, device, memory, self._captured, pause)
        self.lifetime = Lifetime(strategy, needed, self._is_whole)
        self.progress = Progress(persisted=self.lifetime.persisted)
        self._agreement, self._allowance = agreement, allowance
        self._report = report
        self.may_give_up_own = False
        """Whether own snapshots that peers have may go where host memory is used up."""
        self.give_up_log: Callable[[int], object] = lambda nbytes: None
        """Makes the boundary log give up so many bytes, where there is one."""
        self._writer: WindowWriter | None = None
        self._written_from = NONE
        self.asked_bytes = 0
        """That each peer was asked for."""
        self._fitted: Schedule | None = history.newest
        """A schedule of the windows that memory was made for; None: for other ones, too, that are over or will be."""
        self._fitting: Schedule | None = None
        """A schedule of the windows that memory is brought down to."""
        self._paused = False
        """No snapshot is taken until there is room for a whole window."""
        self._waited_s = 0.0
        """For the gradients that are live, until now."""
        self._live = self._gone = NONE
        """The iteration whose gradients are in the live tensors; the last one whose gradients no longer are."""
        self._final: Event | None = None
        """Where the gradients of the newest update were final, until they are logged or gone."""
        self.make_room_for_kept()

    def _is_whole(self, run: RecoverableRun) -> bool:
        """Ranks agree on runs by where they begin. A stage with fewer operators than slots can be restored to earlier
        iterations than the others from there, and that is of no use to the job.
        """
        if not run.is_redone or run.first < self.history.oldest.start:
            return True
        return run.last >= self.history.at(run.first).last_of_run(run.first)

    # Once an iteration

    def capture(
        self,
        iteration: int,
        record: Any,
        *,
        state: int | None = None,
        whole: Collection[str] = (),
        is_updated: bool = True,
        may_wait: bool = False,
    ) -> None:
        """Begin ``SS_iteration``, if there is to be one, while ``state@iteration`` is live; frees what no plan needs.

        Args:
            iteration: the last one committed.
            record: boundary state and iteration record, plain data with tensors; copied before this returns (or, on a
                GPU, in the order of the current stream).
            state: the iteration whose state is live, where that is another; see :class:`Header`.
            whole: operators of whose whole state a digest is made, too.
            is_updated: whether ``state@iteration`` came by an update; not where a run starts, or an iteration was left
                out. Of an update gradients have to be there where they are logged.
            may_wait: whether to wait for room that peers will make by having what came before.

        Raises:
            SnapshotError: the record is larger than was said, or an earlier copy failed.
        """
        self._learn(iteration)
        self._measure()
        self.capturer.last = self.capturer.last_logged = None
        if iteration in self.own:
            self.capturer.drop_logged()
            return  # taken before a failure that the job has recovered from
        if not self.takes(iteration) or not self._may_take(iteration):
            return
        if not self.take(iteration, record, state=state, whole=whole, is_updated=is_updated, may_wait=may_wait):
            self._abandon(iteration)

    # Gradients of the newest update

    def mark_gradients(self) -> None:
        """Note that the gradients of the update that is about to be made are final; waits for nothing.

        On a GPU their copies then run beside the update, and not after it.
        """
        self._final = self.capturer.mark_gradients()

    def log_gradients(self, iteration: int, *, is_replayed: bool = False) -> None:
        """Begin to copy the gradients that the update to ``state@iteration`` was made from, where they are logged.

        After the update, and before anything overwrites them, which :meth:`let_gradients_go` comes before.

        Args:
            iteration: whose gradients are in the live tensors.
            is_replayed: whether it was run again, so that they are there again.
        """
        final, self._final = self._final, None
        if iteration <= self._gone and not is_replayed:
            return
        self._live = iteration
        if iteration in self.own or not self.takes(iteration):
            return
        schedule = self.history.at(iteration)
        if self.capturer.logs_gradients(iteration, schedule) and self._may_take(iteration):
            self._log(iteration, schedule, None if is_replayed else final)

    def let_gradients_go(self, iteration: int) -> float:
        """Block until gradients of ``iteration`` may be overwritten in the current stream; returns seconds of stall.

        They will be. On a GPU the host does not wait for copies that are under way, but that stream does.
        """
        self.end_gradients()
        stall_s, self._waited_s = self._waited_s, 0.0
        self.progress.gradient_stall_s = stall_s
        self._gone = iteration
        return stall_s

    def end_gradients(self) -> None:
        """Block until the gradients that are logged may be overwritten in the current stream, which will happen before
        :meth:`let_gradients_go`, which counts it. What has not been logged by now cannot be any more.
        """
        self._final = None
        self._waited_s += self.capturer.let_gradients_change()
        self._live = NONE

    def _log(self, iteration: int, schedule: Schedule, ready: Event | None = None) -> bool:
        if self.capturer.log(iteration, schedule, ready):
            return True
        self._make_more_room(schedule)
        return self.capturer.log(iteration, schedule, ready)

    def _may_take(self, iteration: int) -> bool:
        """Whether a snapshot is taken, or none before a whole window has room again."""
        if self._paused:
            self._make_more_room(self.history.at(iteration))  # a new run beside the persisted one
            if not self._has_room(iteration):
                if self.replicator.are_full:  # which may not have been known when the window was abandoned
                    self._let_go_of_what_is_under_way()
                return False
        self._paused = False
        return True

    def _make_more_room(self, schedule: Schedule) -> None:
        memory, beside = self.memory, self.memory.beside(self._persisted_bytes(), schedule)

        def here() -> int:  # asked again when own snapshots are no longer kept
            return max(memory.here_after_gap(schedule), beside if memory.keeps_own else 0)

        self._grow(here, max(memory.at_peer_after_gap(schedule), beside))

    def _persisted_bytes(self) -> int:
        """Return the bytes of the run that is persisted, as peers keep it."""
        first, last = self.needed
        if first < self.history.oldest.start:
            return 0
        taken = [iteration for iteration in range(first, last + 1) if self.takes(iteration)]
        schedules = [self.history.at(iteration) for iteration in taken]
        return self.memory.run_bytes(
            (schedule, schedule.slot(iteration)) for schedule, iteration in zip(schedules, taken, strict=True)
        )

    def takes(self, iteration: int) -> bool:
        """Whether there is to be an ``SS_iteration``."""
        return iteration >= self.history.oldest.start and self.history.contents(iteration) is not None

    def take(
        self,
        iteration: int,
        record: Any,
        *,
        state: int | None = None,
        whole: Collection[str] = (),
        is_updated: bool = True,
        may_wait: bool = True,
    ) -> bool:
        """Begin ``SS_iteration``, which there is to be, and say nothing to other ranks; whether there was room, and,
        where they are logged, the gradients were at hand.
        """
        schedule = self.history.at(iteration)
        state = iteration if state is None else state
        if is_updated and self.capturer.logs_gradients(iteration, schedule):
            is_logged = self.capturer.has_logged(iteration, schedule)
            if not is_logged and not (self._live == iteration and self._log(iteration, schedule)):
                return False  # they are gone, or had no room
        else:
            self.capturer.drop_logged()  # of an earlier schedule
        if self.capturer.take(iteration, schedule, record, state=state, whole=whole):
            return True
        self._make_more_room(schedule)
        if may_wait and self.own.keepers is not None:
            self._wait_for_room(iteration, schedule)
        return self.capturer.take(iteration, schedule, record, state=state, whole=whole)

    def _wait_for_room(self, iteration: int, schedule: Schedule) -> None:
        """Several in a row, where what peers have is not kept here: they go as peers have them."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.capturer.has_room(iteration, schedule) and time.monotonic() < deadline_s:
            time.sleep(STEP_S)

    def pause(self, iteration: int) -> None:
        """Take no ``SS_iteration``; only for measuring what snapshots cost. Replaces :meth:`capture`, on all ranks."""
        self._learn(iteration)
        self._measure()
        self.capturer.drop_logged()
        self.capturer.last = self.capturer.last_logged = None

    def wait(self) -> float:
        """Before the optimizer step: block until the snapshot has left the live tensors; returns seconds of stall."""
        progress = self.progress
        progress.stall_s = self.capturer.wait()
        parts = self.capturer.parts
        progress.copied_bytes = sum(copies.nbytes for copies in parts)
        progress.copy_s = sum(copies.copy_s for copies in parts)
        progress.copy_cpu_s = sum(copies.copy_cpu_s for copies in parts)
        return progress.stall_s

    # What is kept, here and everywhere

    @property
    def needed(self) -> tuple[int, int]:
        """First and last snapshot of the run that is persisted on every rank; ``NONE`` if there is none."""
        return self.lifetime.persisted, self.lifetime.last_needed

    @property
    def oldest_needed(self) -> int:
        """Where the run begins that the job falls back to; before there is one, this rank's oldest snapshot."""
        return self.lifetime.persisted if self.lifetime.persisted != NONE else min(self.own, default=NONE)

    def persisted(self) -> dict[int, Any]:
        """What the snapshots hold that all peers have (with no peers: that are captured)."""
        return self.own.had_by(self.replicator.peers)

    @property
    def is_saving(self) -> bool:
        """Whether the last snapshot is still on its way somewhere, or was when the iteration began."""
        return (
            self.capturer.last is not None
            or bool(self.own.deliverable().keys() - self.persisted().keys())
            or (self._writer is not None and self._writer.writing is Writing.BUSY)
        )

    def disk_rate(self) -> float:
        """Bytes per second at which snapshots were written to disk; infinite where none were."""
        writer = self._writer
        return writer.written_bytes / writer.write_s if writer is not None and writer.write_s else float("inf")

    def make_room(self, *schedules: Schedule) -> None:
        """Set host memory aside for one of ``schedules`` after the other, where there is not enough; peers are asked
        for the same. What was given back of it is allocated when it is needed.
        """
        at_peer = self.memory.at_peer(schedules)
        if self.memory.here(schedules) > self._allowance.of(OWN):
            self._grow(lambda: self.memory.here(schedules), at_peer)
        else:
            self._ask_peers(at_peer)

    def make_room_for_kept(self) -> None:
        """Set host memory aside for every schedule that a snapshot may still be kept of, or be taken of again.

        Not for windows that were over before a failure: what was given back of them would come again.
        """
        kept = self.history.since(self.lifetime.persisted)
        if any(is_other_window(schedule, self.history.newest) for schedule in kept):
            self._fitted = None
        self.make_room(*kept)

    def _grow(self, here: Callable[[], int], at_peer: int) -> None:
        """Have room on this rank, as much as is kept here, and at each peer."""
        if not self._set_aside(here()):
            self._give_up_own()
        if not self._set_aside(here()):
            self.give_up_log(int(here() - self._allowance.left_for(OWN)))
            self._set_aside(here())
        self._ask_peers(at_peer)

    def _ask_peers(self, nbytes: int) -> None:
        if nbytes > self.asked_bytes:
            self.asked_bytes = nbytes
            self.replicator.open(nbytes)

    def _fit(self) -> None:
        """Give back what only windows of another size needed that are over, a little in each iteration.

        Peers do the same. What is set aside for lag goes too where none came, here and there; it is allowed as before.
        Not after every reorder: what the next would need again is page-locked slowly.
        """
        kept = self.history.since(self.lifetime.persisted)
        newest = self.history.newest
        if self._paused or (self._fitted is not None and not is_other_window(newest, self._fitted)):
            return
        if any(is_other_window(newest, schedule) for schedule in kept):
            return
        # Each alone, as they were asked for: what a gap between two needs is made room for where there is one.
        here = max(self.memory.here([schedule]) for schedule in kept)
        at_peer = max(self.memory.at_peer([schedule]) for schedule in kept)
        arena = self.own.arena
        if self._fitting is None or is_other_window(newest, self._fitting):
            arena.watch()
            if at_peer < self.asked_bytes:
                self.asked_bytes = at_peer
                self.replicator.open(at_peer)
            self._fitting = newest
        may_go = arena.fit(here)
        self._allowance.keep(OWN, max(here, arena.nbytes))
        if not may_go:
            self._fitted, self._fitting = newest, None

    def write_to(self, writer: WindowWriter | None, first: int) -> None:
        """Write windows that begin with ``SS_first`` or later to disk, once they are persisted on every rank.

        Every rank calls it at the same point. Without a writer nothing is written from now on.
        """
        self._writer, self._written_from = writer, first

    def lease(self, first: int, last: int, stores: Sequence[PeerStore]) -> list[SnapshotLease] | None:
        """Snapshots ``first`` to ``last`` of this rank and those that ``stores`` have.

        Nothing if one is gone, or if they are not enough: right after a reorder a run of this stage may be longer.
        """
        if self.lifetime.last_needed > last:
            return None
        taken = [iteration for iteration in range(first, last + 1) if self.takes(iteration)]
        leased: list[SnapshotLease | None] = [self.own.lease(iteration) for iteration in taken]
        leased += [store.lease(iteration) for store in stores for iteration in taken]
        whole = [one for one in leased if one is not None]
        if len(whole) == len(leased):
            return whole
        for one in whole:
            one.release()
        return None

    # After a failure

    def adopt(self, snapshot: Snapshot) -> bool:
        """Keep a copy of ``snapshot``, which this rank's number took in another process, or know of it where all peers
        have it and that is enough; whether there was room.
        """
        if snapshot.iteration in self.own:
            return True
        had_by = self.replicator.had_by(snapshot)
        if self.own.keepers is not None and self.own.keepers <= set(had_by):
            self.own.know_of(snapshot, had_by)
            return True
        return self.capturer.adopt(snapshot)

    def forget_after(self, iteration: int) -> None:
        """Later snapshots, here and at peers, are of iterations that the job runs again and with another outcome."""
        if self.lifetime.last_needed > iteration:  # what it goes back to came from disk
            self.lifetime.nothing_is_persisted()
            self.progress.persisted = self.lifetime.persisted
            for store in self.replicator.stores:
                store.lower_floor(iteration + 1)
        gone = [one for one in self.own if one > iteration]
        self.own.free(gone)
        if gone:
            self.replicator.drop(min(gone), max(gone))
        # A rank that is new never had what is kept here of the one before it.
        for store in self.replicator.stores:
            store.drop(iteration + 1, HORIZON)

    def rewire(
        self,
        senders: Sequence[Sender],
        receivers: Sequence[Receiver],
        agreement: Agreement,
        has: Copies,
        former: Collection[PeerStore] = (),
    ) -> None:
        """Go on with other peers, or the same ones over new connections; every snapshot that is whole stays.

        Args:
            senders: one for each peer; they are given what their peer does not have.
            receivers: one for each rank whose snapshots are kept here; their stores may have some already.
            agreement: how ranks learn what all of them have, from now on.
            has: by peer, the snapshots of this rank that it has: the id of the schedule by iteration.
            former: stores of ranks that have other peers now; they go when the next window is persisted.
        """
        self.capturer.begin_again()
        self._keep_where_said([sender.peer for sender in senders])
        kept = self.own.forget_peers(has)
        self.own.arena.reclaim([*self.own.buffers(), *self.capturer.buffers()])
        self._agreement, self._paused = agreement, False
        self.progress.is_winding_down = False  # what was agreed on before a failure a new rank does not know
        self.replicator.rewire(senders, receivers, has, former)
        self.replicator.open(self.asked_bytes)
        for held in kept:
            if held.snapshot is not None:
                self.replicator.replicate(held)

    def _set_aside(self, nbytes: int) -> bool:
        """Host memory for own snapshots; whether there is so much."""
        arena = self.own.arena
        if nbytes <= arena.nbytes:
            return True
        if not self._allowance.take(OWN, nbytes):
            return False
        try:
            arena.grow(nbytes)
        except RuntimeError as error:
            self._allowance.keep(OWN, arena.nbytes)
            self._report(f"no host memory for snapshots: {str(error).splitlines()[0]}")
            return False
        return True

    def _give_up_own(self) -> None:
        """Where host memory is used up, and that is allowed: own copies of what all peers have go first."""
        has_copies = len(self.replicator.peers) >= FEWEST_COPIES
        if not self.may_give_up_own or not self.memory.keeps_own or not has_copies:
            return
        self.memory.keeps_own = False
        self._keep_where_said(self.replicator.peers)
        count = self.own.drop_kept_elsewhere(self.replicator.peers)
        self._report(
            f"host memory is used up ({self._allowance.total_bytes / 1e9:.3f} GB): own snapshots that all peers have "
            f"are not kept any more, {count} of them from now on"
        )

    def _keep_where_said(self, peers: Collection[int]) -> None:
        self.own.keepers = frozenset(peers) if peers and not self.memory.keeps_own else None

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish copies and sends; whether all peers were done in time. Nothing may be captured afterwards."""
        self._take_in()
        self.capturer.close()
        return self.replicator.close(timeout_s)

    # Its parts

    def _captured(self, held: Held, snapshot: Snapshot) -> None:
        """On the capture thread: hand the snapshot to the senders."""
        self.own.captured(held, snapshot, self.replicator.had_by(snapshot))
        self.replicator.replicate(held)
        self.own.end_use(held)

    def agree_at_end(self, iteration: int) -> None:
        """Agree once more on what is persisted, have the newest run written; every rank calls it after :meth:`close`.

        Training agrees an iteration later on what peers acknowledged. After the last iteration there is none.
        """
        self._learn(iteration)
        self._take_in()

    def _learn(self, iteration: int) -> None:
        """Take in where the job's runs stood an iteration ago, free what none of them needs, say where ours stand."""
        self._take_in()
        statuses = self.lifetime.statuses(iteration, self.own.deliverable(), self.persisted())
        self._agreement.propose(iteration, statuses, self._writer.writing if self._writer else Writing.NOTHING)

    def _take_in(self) -> None:
        """Take in what all ranks agreed on last, and free what no run needs."""
        if agreed := self._agreement.agreed():
            self.progress.is_winding_down = agreed.is_winding_down
            unneeded = self.lifetime.learn(agreed, self.own)
            self.progress.persisted = self.lifetime.persisted
            self.own.free({*unneeded.old, *unneeded.lost})
            if self.own.keepers is not None:  # that a recovery read when peers had them
                self.own.drop_kept_elsewhere(self.own.keepers)
            if self.lifetime.persisted != NONE:  # each time: a failure may have interrupted the last
                last = self._ends_at()
                if self.replicator.free(self.lifetime.persisted, last):
                    self._allowance.forget_sources(but={store.key for store in self.replicator.stores})
                if last is not None:
                    self.own.give_back(superseded(self.own.contents(), last))
                self._fit()
            if unneeded.lost:
                self.replicator.drop(min(unneeded.lost), max(unneeded.lost))
            if self._writer is not None:
                self._writer.learn(agreed.writing)
                if self.lifetime.persisted >= self._written_from:
                    first = self.lifetime.persisted
                    self._writer.begin(first, self.history.at(first).last_of_run(first))

    def _ends_at(self) -> int | None:
        """Where the run ends that is persisted, on every rank alike; None: parts of it are not given back."""
        first = self.lifetime.persisted
        if not self.memory.gives_back:
            return None
        return self.history.at(first).last_of_run(first) if first >= self.history.oldest.start else None

    def _has_room(self, iteration: int) -> bool:
        """Whether a window that begins now could be captured whole."""
        schedule = self.history.at(iteration)
        return schedule.may_begin_at(iteration) and self.own.arena.available >= self.memory.window_here(schedule)

    def _let_go_of_what_is_under_way(self) -> list[int]:
        under_way = self.lifetime.under_way(self.own.deliverable(), peers_are_full=self.replicator.are_full)
        self.own.free(under_way)
        if under_way:
            self.replicator.drop(under_way[0], under_way[-1])
        return under_way

    def _abandon(self, iteration: int) -> None:
        """Give up the window under way, and take no snapshot before a whole one has room again."""
        is_room_left = self.capturer.has_room(iteration, self.history.at(iteration))
        under_way = self._let_go_of_what_is_under_way()
        self._paused = True
        self.progress.abandoned += 1
        if self.progress.abandoned & (self.progress.abandoned - 1):  # the 1st, 2nd, 4th, 8th ... is reported
            return
        why = "its gradients were not logged" if is_room_left else "no host memory is free"
        lost = f"snapshots {under_way[0]} to {under_way[-1]}" if under_way else "no snapshot yet"
        self._report(
            f"iteration {iteration}: {why}, so the window under way ({lost}) is abandoned; the "
            f"persisted one stays. Abandoned so far: {self.progress.abandoned}. Peers that lag: "
            f"{self.replicator.backlog()}. Snapshots go on when a whole window has room"
        )

    def _measure(self) -> None:
        progress, capture = self.progress, self.capturer.last
        progress.replicated_bytes = self.replicator.sent_since()
        if capture is not None and capture.finished.is_open:
            progress.digest_cpu_s = sum(copies.digest_cpu_s for copies in self.capturer.parts)
            progress.whole_cpu_s = capture.whole_cpu_s
        captured = self.own.snapshots()
        if captured:
            progress.lag = max(captured) - max(self.persisted(), default=min(captured) - 1)
        progress.memory_bytes = self.own.arena.nbytes + self.replicator.memory_bytes
