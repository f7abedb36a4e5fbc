"""Sparse checkpointing of one rank: a snapshot every iteration, from its capture until its memory is freed.

The steps are in modules that are nearly independent: ``capture.py`` copies state, ``own.py`` counts the users of
buffers, ``lifetime.py`` decides what is kept, ``replicator.py`` sends copies, and ``storage/writer.py`` writes windows
to disk. :class:`Checkpointer` calls them once an iteration, in an order in which no module frees memory that another
still needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from moevement_core.device import Device
from moevement_core.engine.capture import Capturer
from moevement_core.engine.layout import OperatorState
from moevement_core.engine.lifetime import Lifetime, RunSpan
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.own import Copies, HeldBuffer, OwnSnapshots
from moevement_core.engine.progress import CheckpointCounters
from moevement_core.engine.replicator import Replicator
from moevement_core.engine.room import Room
from moevement_core.overhead.pause import Pause
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Schedule, ScheduleHistory, last_of_run
from moevement_core.replication.allowance import Allowance
from moevement_core.replication.peer_store import PeerStore
from moevement_core.replication.receiver import Receiver
from moevement_core.replication.sender import Sender
from moevement_core.snapshot.agreement import Agreement, Writing
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.storage.writer import WindowWriter
from moevement_core.strategies.strategy import Strategy
from moevement_core.util.iterations import is_newer

Report = Callable[[str], None]
PATIENCE_S = 30.0
"""Most seconds that a capture waits for a free buffer, at the start of a job or in a recovery.

Buffers become free when peers acknowledge earlier snapshots.
"""
STEP_S = 0.005
"""Seconds between two checks for a free buffer while a capture waits."""


class Checkpointer:
    """Sparse checkpointing of one rank: capture, replication and release of its snapshots.

    Every method is for the training thread. Each rank of the job calls :meth:`capture` once an iteration. A *run* is a
    recoverable run: consecutive snapshots that together hold a whole state.

    Args:
        rank: this rank.
        states: live tensors of the operators that this rank holds; they stay valid for the whole job.
        own: snapshots of this rank; none has been captured yet.
        strategy: strategy that finds the runs from which the job can be restored.
        history: schedules of the job. The newest schedule decides the size of buffers.
        device: device of the live tensors.
        senders: one sender for each peer.
        receivers: one receiver for each rank whose snapshots this rank keeps.
        agreement: reduction by which all ranks agree on persisted runs.
        memory: computation of the host memory that this rank's snapshots need.
        allowance: host memory that this rank may use.
        report: function that is called with each warning for the users of the job.
        has: schedule ids, by peer and iteration, of snapshots that peers hold from an earlier process of this rank. If
            a peer's snapshot has another schedule id, it holds other operators, and this rank sends its own snapshot
            of that iteration.
        needed: run that is persisted on every rank; None without one. Peers keep their copies of this run until a newer
            run is persisted.
        pause: switch that stops the digests of the capture thread in some iterations, so that the job can measure what
            saving costs. None: the digests never stop.
        may_give_up_own: True if own snapshots that all peers hold may be dropped when host memory is used up.
        give_up_log: function that frees the given number of bytes of the boundary log; without a log it does nothing.
    """

    def __init__(
        self,
        rank: int,
        states: Mapping[str, OperatorState],
        own: OwnSnapshots,
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
        needed: RunSpan | None = None,
        pause: Pause | None = None,
        may_give_up_own: bool = False,
        give_up_log: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.history, self.memory, self.own = history, memory, own
        self._keep_where_said([sender.peer for sender in senders])
        self.replicator = Replicator(self.own, senders, receivers, has or {})
        self.lifetime = Lifetime(strategy, needed, self._is_whole)
        self.progress = CheckpointCounters(persisted=self.lifetime.first_needed)
        self.capturer = Capturer(
            rank, states, own=own, device=device, memory=memory, done=self._captured, progress=self.progress,
            pause=pause,
        )  # fmt: skip
        self.gradients = self.capturer.gradients
        self._agreement, self._allowance = agreement, allowance
        self._report = report
        self.room = Room(
            memory=memory,
            own=own,
            replicator=self.replicator,
            allowance=allowance,
            report=report,
            newest=history.newest,
            may_give_up_own=may_give_up_own,
            give_up_log=give_up_log,
        )
        self._writer: WindowWriter | None = None
        self._written_from = 0
        """First snapshot of the first window that :attr:`_writer` writes."""
        self._paused = False
        """True if no snapshot is taken until memory for a whole window is free."""
        self.room.make_for_kept(self.kept_schedules)

    def _is_whole(self, run: RecoverableRun) -> bool:
        """Return True if ``run`` is as long as the runs of other stages from the same first snapshot.

        Ranks agree on runs by the first snapshot alone. If a stage has fewer operators than slots, its runs for
        redo are complete earlier than those of other stages, and restore an earlier iteration. Such a short run does
        not count.
        """
        if not run.is_redone or run.first < self.history.oldest.start:
            return True
        return run.last >= last_of_run(self.history.at(run.first), run.first)

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
        """Free snapshots that no restore point needs, and begin to capture ``SS_iteration`` if it is due.

        Called while ``state@iteration`` is live.

        Args:
            iteration: the last committed iteration.
            record: boundary record, and what the rank recorded of the iteration's step: plain data with tensors. The
                tensors are copied before this call returns or, on a GPU, in the order of the current stream.
            state: iteration whose state is live, if that is not ``iteration``, as in the snapshots before a job's first
                iteration (:attr:`Header.state`).
            whole: operators for which the snapshot records a digest of their whole state.
            is_updated: True if an update led to ``state@iteration``; False at the start of a job and after an iteration
                without an update. If True, and if the schedule asks for gradients that are already overwritten, the
                window is abandoned.
            may_wait: True to wait until peers acknowledge earlier snapshots and so free memory.

        Raises:
            SnapshotError: the record is larger than the memory set aside for it, or an earlier copy failed.
        """
        self._learn(iteration)
        self._measure()
        self.capturer.last = self.gradients.last = None
        if iteration in self.own:
            self.gradients.drop()
            return  # this rank captured the snapshot before a failure, and the job now repeats the iteration
        if not self.history.takes(iteration) or not self._may_take(iteration):
            return
        if not self.take(iteration, record, state=state, whole=whole, is_updated=is_updated, may_wait=may_wait):
            self._abandon(iteration)

    def log_gradients(self, iteration: int, *, is_replayed: bool = False) -> None:
        """Begin to copy the gradients of ``iteration``'s update, if the schedule logs them.

        Call this method after the update and before :meth:`GradientLog.wait`, after which the trainer overwrites the
        gradients.

        Args:
            iteration: iteration whose gradients are in the live tensors.
            is_replayed: True if a recovery executed the iteration again, so that its gradients are live again.
        """
        if not self.gradients.begin(iteration, is_replayed=is_replayed):
            return
        if iteration in self.own or not self.history.takes(iteration):
            return
        schedule = self.history.at(iteration)
        if self.gradients.are_due(iteration, schedule) and self._may_take(iteration):
            self._log(iteration, schedule)

    def _log(self, iteration: int, schedule: Schedule) -> bool:
        if self.gradients.copy(iteration, schedule):
            return True
        self.room.make_beside(self._persisted_bytes(), schedule)
        return self.gradients.copy(iteration, schedule)

    def _may_take(self, iteration: int) -> bool:
        """Return True if snapshots are not paused. End a pause first, if memory for a whole window is free now."""
        if self._paused:
            schedule = self.history.at(iteration)
            self.room.make_beside(self._persisted_bytes(), schedule)
            if not self.room.may_begin(schedule, iteration):
                if self.replicator.are_full:  # the peers may have become full after the window was abandoned
                    self._drop_open_window()
                return False
        self._paused = False
        return True

    def _persisted_bytes(self) -> int:
        """Return the bytes that the persisted run's snapshots take as long as no part of them is freed."""
        run = self.lifetime.fallback
        if run is None or run.first < self.history.oldest.start:
            return 0
        taken = [iteration for iteration in range(run.first, run.last + 1) if self.history.takes(iteration)]
        schedules = [self.history.at(iteration) for iteration in taken]
        return self.memory.run_bytes(
            (schedule, schedule.slot(iteration)) for schedule, iteration in zip(schedules, taken, strict=True)
        )

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
        """Begin to capture ``SS_iteration``, which is due. Unlike :meth:`capture`, this method does not communicate.

        Arguments and errors are those of :meth:`capture`.

        Returns:
            True if a buffer was free and all gradients that the snapshot holds were still live or logged.
        """
        schedule = self.history.at(iteration)
        state = iteration if state is None else state
        if is_updated and self.gradients.are_due(iteration, schedule):
            is_logged = self.gradients.has(iteration, schedule)
            if not is_logged and not (self.gradients.live == iteration and self._log(iteration, schedule)):
                return False  # the gradients are overwritten, or no buffer was free
        else:
            self.gradients.drop()  # an earlier schedule wanted these gradients
        if self.capturer.take(iteration, schedule, record, state=state, whole=whole):
            return True
        self.room.make_beside(self._persisted_bytes(), schedule)
        if may_wait and self.own.keepers is not None:
            self._wait_for_room(iteration, schedule)
        return self.capturer.take(iteration, schedule, record, state=state, whole=whole)

    def _wait_for_room(self, iteration: int, schedule: Schedule) -> None:
        """Wait at most :data:`PATIENCE_S` until memory for a snapshot is free.

        Called only if this rank keeps no own copies. Such a rank frees a buffer when all peers have the snapshot in it.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.capturer.has_room(iteration, schedule) and time.monotonic() < deadline_s:
            time.sleep(STEP_S)

    def pause(self, iteration: int) -> None:
        """Leave out ``SS_iteration``, to measure the cost of saving; all ranks call this instead of :meth:`capture`."""
        self._learn(iteration)
        self._measure()
        self.gradients.drop()
        self.capturer.last = self.gradients.last = None

    def wait(self) -> float:
        """Block until the live tensors are copied; return the seconds of stall. Called before the optimizer step."""
        progress = self.progress
        progress.stall_s = self.capturer.wait()
        parts = self.capturer.parts
        progress.copied_bytes = sum(copies.nbytes for copies in parts)
        progress.copy_s = sum(copies.copy_s for copies in parts)
        progress.copy_cpu_s = sum(copies.copy_cpu_s for copies in parts)
        return progress.stall_s

    # Kept snapshots and their memory

    @property
    def oldest_needed(self) -> int | None:
        """First snapshot of the persisted run; before there is one, the oldest snapshot of this rank, or None."""
        first = self.lifetime.first_needed
        return first if first is not None else min(self.own, default=None)

    @property
    def kept_schedules(self) -> tuple[Schedule, ...]:
        """Schedules whose snapshots this rank may still keep or capture again, the oldest first."""
        return self.history.since(self.lifetime.first_needed)

    @property
    def _persisted(self) -> dict[int, Any]:
        """Return the contents of snapshots that all peers have, by iteration; without peers, of all own snapshots."""
        return self.own.acked_by(self.replicator.peers)

    @property
    def is_saving(self) -> bool:
        """True if a snapshot was captured at the beginning of this iteration, or is being captured, sent or written."""
        return (
            self.capturer.last is not None
            or bool(self.own.deliverable(self.replicator.peers).keys() - self._persisted.keys())
            or (self._writer is not None and self._writer.writing is Writing.BUSY)
        )

    @property
    def disk_bytes_per_s(self) -> float:
        """Bytes per second at which snapshots were written to disk; infinite if none were."""
        writer = self._writer
        return writer.written_bytes / writer.write_s if writer is not None and writer.write_s else float("inf")

    def write_to(self, writer: WindowWriter | None, first: int) -> None:
        """Make ``writer`` write each window to disk once it is persisted on every rank.

        Windows that begin before ``SS_first`` are not written. Every rank calls this method at the same point. If
        ``writer`` is None, nothing is written from now on.
        """
        self._writer, self._written_from = writer, first

    # After a failure

    def adopt(self, snapshot: Snapshot) -> bool:
        """Keep a copy of a snapshot that an earlier process of this rank captured.

        If this rank keeps no own copies and all peers hold the snapshot, only its header is kept.

        Returns:
            False if no buffer was free.
        """
        if snapshot.iteration in self.own:
            return True
        acked_by = self.replicator.acked_by(snapshot)
        if self.own.keepers is not None and self.own.keepers <= set(acked_by):
            known = Snapshot(snapshot.header, Buffer(), set(acked_by))
            self.own.add(
                HeldBuffer(
                    snapshot.iteration, known.buffer, snapshot.contents, snapshot.contents_at_peers, users=0,
                    snapshot=known, dropped=True,
                )
            )  # fmt: skip
            return True
        return self.capturer.adopt(snapshot)

    def forget_after(self, iteration: int) -> None:
        """Drop snapshots after ``iteration``, here and at peers, because the job executes later iterations again.

        In the second execution, these iterations may have other results than in the first.
        """
        if is_newer(self.lifetime.last_needed, iteration):  # the job went back to a window from disk
            self.lifetime.nothing_is_persisted()
            self.progress.persisted = None
            for store in self.replicator.stores:
                store.lower_floor(iteration + 1)
        dropped = [later for later in self.own if later > iteration]
        self.own.free(dropped)
        if dropped:
            self.replicator.drop(min(dropped), max(dropped))
        self.replicator.forget_after(iteration)

    def rewire(
        self,
        senders: Sequence[Sender],
        receivers: Sequence[Receiver],
        agreement: Agreement,
        has: Copies,
        former: Collection[PeerStore] = (),
    ) -> None:
        """Replace the connections to peers, after a failure, and keep every complete snapshot.

        Args:
            senders: one sender for each peer; each sends the snapshots that its peer does not have.
            receivers: one receiver for each rank whose snapshots this rank keeps. Their stores may hold snapshots from
                before the failure.
            agreement: reduction by which ranks agree from now on.
            has: schedule ids, by peer and iteration, of this rank's snapshots that peers hold.
            former: stores of ranks that now have other peers. They are freed when the next window is persisted.
        """
        self.capturer.reset()
        self._keep_where_said([sender.peer for sender in senders])
        kept = self.own.forget_peers(has)
        self.own.arena.reclaim([*self.own.buffers, *self.gradients.buffers])
        self._agreement, self._paused = agreement, False
        self.progress.is_winding_down = False  # a replacement does not know of an earlier agreement
        self.replicator.rewire(senders, receivers, has, former)
        self.room.ask_peers_again()
        for held in kept:
            if held.snapshot is not None:
                self.replicator.replicate(held)

    def _keep_where_said(self, peers: Collection[int]) -> None:
        self.own.keepers = frozenset(peers) if peers and not self.memory.keeps_own_copies else None

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish captures and sends; return True if all sends were done in time. No snapshot may be captured later."""
        self._take_in()
        self.capturer.close()
        return self.replicator.close(timeout_s)

    # Steps of the methods above

    def _captured(self, held: HeldBuffer, snapshot: Snapshot) -> None:
        """Pass a captured snapshot to the senders; called on the capture thread."""
        self.own.captured(held, snapshot, self.replicator.acked_by(snapshot))
        self.replicator.replicate(held)
        self.own.end_use(held)

    def agree_at_end(self, iteration: int) -> None:
        """Agree once more on persisted runs, and write the newest run to disk; all ranks call this after :meth:`close`.

        During training, ranks agree in each iteration on what peers acknowledged in the previous iteration. For the
        last iteration they agree here.
        """
        self._learn(iteration)
        self._take_in()

    def _learn(self, iteration: int) -> None:
        """Apply the agreement of the previous iteration, then propose statuses of this rank's runs for the next one."""
        self._take_in()
        statuses = self.lifetime.statuses(iteration, self.own.deliverable(self.replicator.peers), self._persisted)
        self._agreement.propose(iteration, statuses, self._writer.writing if self._writer else Writing.NOTHING)

    def _take_in(self) -> None:
        """Apply the last agreement: free snapshots that no run needs, and write the newest window to disk."""
        if agreed := self._agreement.agreed():
            self.progress.is_winding_down = agreed.is_winding_down
            unneeded = self.lifetime.learn(agreed, self.own)
            self.progress.persisted = persisted = self.lifetime.first_needed
            self.own.free({*unneeded.old, *unneeded.lost})
            if persisted is not None:  # repeated in every call: a failure may have interrupted the last call
                last = self._ends_at(persisted)
                if self.replicator.free(persisted, last):
                    self._allowance.forget_sources(but={store.memory.key for store in self.replicator.stores})
                if last is not None:
                    self.own.free_unneeded(last)
                if not self._paused:
                    self.room.fit(self.kept_schedules)
            self.replicator.withheld = frozenset(unneeded.withheld)
            for first, last in unneeded.lost_ranges:
                self.replicator.drop(first, last)
            if persisted is None or persisted >= self.history.oldest.start:
                longest = None if persisted is None else self._longest_end(persisted)
                for first, last in self.lifetime.useless_copies(agreed, longest):
                    self.replicator.drop_copies(first, last)
            if self._writer is not None:
                self._writer.learn(agreed.writing)
                if persisted is not None and persisted >= self._written_from:
                    self._writer.begin(persisted, last_of_run(self.history.at(persisted), persisted))

    def _ends_at(self, first: int) -> int | None:
        """Return the last snapshot of the persisted run, equal on all ranks; None if only whole snapshots are freed.

        Args:
            first: first snapshot of the persisted run.
        """
        if not self.memory.gives_back or first < self.history.oldest.start:
            return None
        schedule = self.history.at(first)
        # Schedules that leave experts out free no parts: a restore may need older versions of the left-out experts.
        return last_of_run(schedule, first) if schedule.supersedes else None

    def _longest_end(self, first: int) -> int:
        """Return the last snapshot that a run from ``first`` may have on any rank.

        A run that crosses a change of the schedule may be longer, and by another length on each stage.
        """
        last = last_of_run(self.history.at(first), first)
        newer = self.history.at(last)
        return last if newer is self.history.at(first) else last_of_run(newer, newer.start)

    def _drop_open_window(self) -> list[int]:
        deliverable = self.own.deliverable(self.replicator.peers)
        under_way = self.lifetime.under_way(deliverable, peers_are_full=self.replicator.are_full)
        self.own.free(under_way)
        if under_way:
            self.replicator.drop(under_way[0], under_way[-1])
        return under_way

    def _abandon(self, iteration: int) -> None:
        """Abandon the unfinished window, and pause snapshots until memory for a whole window is free.

        Called if ``SS_iteration`` is due but cannot be captured.
        """
        is_room_left = self.capturer.has_room(iteration, self.history.at(iteration))
        under_way = self._drop_open_window()
        self._paused = True
        self.progress.abandoned += 1
        if self.progress.abandoned & (self.progress.abandoned - 1):  # the 1st, 2nd, 4th, 8th ... time is reported
            return
        why = "its gradients were not logged" if is_room_left else "the host memory reserved for snapshots is full"
        lost = f"snapshots {under_way[0]} to {under_way[-1]}" if under_way else "no snapshot yet"
        self._report(
            f"iteration {iteration}: {why}, so the unfinished window ({lost}) is abandoned; the persisted window "
            f"stays. Windows abandoned so far: {self.progress.abandoned}. Peers that lag: "
            f"{self.replicator.backlog()}. Snapshots continue when a whole window has room in it"
        )

    def _measure(self) -> None:
        progress, capture = self.progress, self.capturer.last
        progress.replicated_bytes = self.replicator.sent_since()
        if capture is not None and capture.finished.is_open:
            progress.digest_cpu_s = sum(copies.digest_cpu_s for copies in self.capturer.parts)
            progress.whole_cpu_s = capture.whole_cpu_s
        captured = self.own.snapshots
        if captured:
            progress.lag = max(captured) - max(self._persisted, default=min(captured) - 1)
        progress.memory_bytes = self.own.arena.nbytes + self.replicator.memory_bytes
