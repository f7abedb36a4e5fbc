"""Sparse checkpointing in Megatron's trainer: what is asked of the engine, and when.

Before iteration t+1 the boundary record is made and ``SS_t`` begins; before its optimizer step the copy must be over;
at a window's beginning order and window may change (``windows.py``). No other collective is made for it than those
there, and one that nobody waits for each iteration (``GroupAgreement``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megatron.moevement.optimizer.commit import CommitPoint, Mark
from megatron.moevement.optimizer.frozen_step import check_supported
from megatron.moevement.optimizer.views import operator_views
from megatron.moevement.pipeline_parallel.sent_bytes import bytes_sent_per_iteration
from megatron.moevement.restart import in_process as restart
from megatron.moevement.restart import injection, places
from megatron.moevement.runtime import recovery, wipe
from megatron.moevement.runtime.boundary import advanced, boundary_after, boundary_copy, boundary_state
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.kept import Kept, check_kept
from megatron.moevement.runtime.persisted import Loaded
from megatron.moevement.runtime.policy import Policy
from megatron.moevement.runtime.progress_watch import ProgressWatch
from megatron.moevement.runtime.ranks import tell_all
from megatron.moevement.runtime.reports import Reports
from megatron.moevement.runtime.wind_down import PlannedExit
from megatron.moevement.runtime.windows import WindowDecisions
from megatron.moevement.runtime.windows_on_disk import WindowsOnDisk
from megatron.moevement.runtime.wiring import wire
from megatron.moevement.sparse_config import SparseConfig, Verify
from moevement_core.boundary_log import BoundaryLog
from moevement_core.device import current_device
from moevement_core.digest import digest
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.layout import buffer_bytes
from moevement_core.errors import ConfigError, RecoveryError
from moevement_core.injection import Phase
from moevement_core.policy.schedule import Saved, Schedule, ScheduleHistory
from moevement_core.recovery.outcome import Recovery
from moevement_core.recovery.plan import Report, Source
from moevement_core.rendezvous.status_page import own_page
from moevement_core.replication.allowance import Allowance
from moevement_core.replication.receiver import Receiver
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.replication.sender import Sender
from moevement_core.snapshot import plain
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.snapshot import BOUNDARY, StateTensor, aligned_bytes

RECORD_SLACK_BYTES = 64 << 10
"""Room for a boundary record to grow."""


Copies = Mapping[int, Mapping[int, str]]
"""What a rank keeps for others: by rank, the id of the schedule of each snapshot by its iteration."""


@dataclass
class Totals:
    """What checkpointing of this rank came to."""

    iterations: int = 0
    stall_s: float = 0.0
    train_s: float = 0.0
    begin_s: float = 0.0
    """On the training thread: boundary record, issuing copies, deciding."""
    copied_bytes: int = 0
    replicated_bytes: int = 0


class Observer:
    """Told before every iteration; for benchmarks."""

    def before_iteration(self, run: SparseRun, committed: int) -> None:
        """``state@committed`` is live and nothing of the next iteration has happened."""


observer = Observer()
"""The one of this process."""


class SparseRun:
    """Sparse checkpointing of one rank of a Megatron job. Every rank makes one at the same point and calls alike."""

    def __init__(
        self,
        job: Job,
        config: SparseConfig,
        loaded: Loaded | None = None,
        adopted: Policy | None = None,
        *,
        same_stage: bool = True,
        kept: Sequence[Copies] = (),
    ) -> None:
        from megatron.core.utils import unwrap_model
        from megatron.training import get_args

        check_supported(job.optimizer)
        self.config = config
        self.job = job
        self.totals = Totals()
        self.capturing = True
        """Whether snapshots are taken; only a benchmark turns it off."""
        self.last_begin_s = 0.0
        """Seconds of the training thread at the beginning of the last iteration."""
        self._device = current_device()
        chunks = unwrap_model(job.model or [])
        self.views = operator_views(chunks, job.optimizer)
        self.wiring = wire(config, self.views.states, job.optimizer, is_running=adopted is not None)
        self.reports = Reports(job, self.wiring.rank)
        self._warn_of_copies()
        self.table = self.wiring.table
        sent_bytes = bytes_sent_per_iteration(get_args(), self.wiring.stage)
        strategy = config.strategy_of(self.table)
        self.windows = WindowDecisions(strategy, chunks, self.wiring, config, self.reports.report, sent_bytes)
        self.began_at = job.iteration
        self._states = {operator.name: state for operator, state in self.views.states.items()}
        self._record_bytes = self._measure_record()
        if adopted is not None:
            if not same_stage:
                adopted = adopted.for_stage(strategy.first(0, self.wiring.most_operators), strategy.learned())
            self.windows.adopt(adopted)
            self.began_at = adopted.began_at
        self.checkpointer = self._start_checkpointer(adopted, kept)
        disk_job, announced = (adopted.disk_job, adopted.announced) if adopted is not None else ("", NONE)
        self.disk = WindowsOnDisk(job, config, self.wiring, self.checkpointer, self.reports, disk_job)
        self.watch = ProgressWatch(job, self.checkpointer, self.reports, config.peer_timeout_s, announced)
        self._settled = adopted or self._policy(job.iteration)
        """As of the last window whose decisions this rank has come to the end of: others may still be in the middle."""
        self._loaded = loaded
        if adopted is None:
            self._refuse_without_copies()
            self.disk.start()
        if self.wiring.pipeline.stages > 1:
            job.boundary_log = BoundaryLog(self._device, self._log_cap_bytes(), self.reports.report)
        self._last_record: dict[str, Any] = {}
        self._recent: dict[int, Mapping[str, Any]] = {}
        """What came of the steps that a replay may come by; kept as long as logs are."""
        self.commit = CommitPoint(job.optimizer, lambda: boundary_after(job), advanced, restart.atomic, self._vote)
        self._exit = PlannedExit(get_args())
        self._is_first = adopted is None
        self._replaying = False
        self.recoveries: list[Recovery] = []
        injection.begin(config.faults)
        places.watch(job)
        self._start_clock()

    # Once

    def policy(self) -> Policy:
        """What this rank has decided with the others of its stage; a decision that is under way is left out."""
        return replace(
            self._settled, announced=self.watch.announced, disk_job=self.disk.job_name, needed=self.checkpointer.needed
        )

    def _policy(self, window_start: int) -> Policy:
        windows = self.windows
        return Policy(
            window_start, self.checkpointer.history.all, windows.strategy.learned(), windows.strategy.settled,
            self.watch.announced, self.began_at, self.disk.job_name, self.checkpointer.needed,
        )  # fmt: skip

    def _start_checkpointer(self, adopted: Policy | None, kept: Sequence[Copies]) -> Checkpointer:
        def bytes_of(schedule: Schedule) -> int:
            return int(buffer_bytes(schedule, self._states, self._record_bytes))

        if adopted is not None:
            history = ScheduleHistory(*adopted.schedules)
        else:
            history = self.windows.first(self.job.iteration, bytes_of)
        own_bytes = max(map(self.windows.slots, history.all)) * max(map(bytes_of, history.all))
        self._senders, receivers = self._connect(own_bytes, history.all, {})
        return Checkpointer(
            self.wiring.rank,
            self._states,
            self.windows.strategy,
            history,
            self._device,
            self._senders,
            receivers,
            self.wiring.agreement,
            self._record_bytes,
            self.reports.report,
            to_disk=self.config.persist_dir is not None,
            has=self._peers_have(kept),
            needed=adopted.needed if adopted is not None else (NONE, NONE),
        )

    def _refuse_without_copies(self) -> None:
        """A peer that has no host memory for copies when the job starts will not have it later; every rank calls it.

        Raises:
            ConfigError: there is such a peer. On every rank.
        """
        refused = [
            sender.peer
            for sender in self._senders
            if sender.wait_for_answer(self.config.peer_timeout_s) and sender.is_refused
        ]
        told = [(rank, peers) for rank, peers in enumerate(tell_all(refused)) if peers]
        if told:
            rank, peers = told[0]
            raise ConfigError(
                f"--moevement-replicas {self.config.replicas}: rank {peers[0]} has no host memory for the copies of "
                f"rank {rank}, as its log says; give more memory, or fewer replicas, or a larger --moevement-window"
            )

    def _log_cap_bytes(self) -> float:
        """What is left for the log beside snapshots; at least what was set aside for it."""
        history = self.checkpointer.history
        aside = max(map(self.windows.log_bytes, history.all))
        left = self.config.host_memory_bytes - self._snapshot_bytes()
        return min(self.config.log_memory_bytes, max(left, aside))

    def _snapshot_bytes(self) -> float:
        """Host memory that own snapshots take, and those of all sources once they have asked for it."""
        own = self.checkpointer.capturer.memory_needed(self.checkpointer.history.newest)
        return own + self.checkpointer.replicator.memory_bytes

    def _peers_have(self, kept: Sequence[Copies]) -> dict[int, Mapping[int, str]]:
        """By peer, the snapshots of this rank that it keeps, from what every rank said."""
        rank = self.wiring.rank
        return {peer: kept[peer].get(rank, {}) for peer in self.wiring.peers[rank]} if kept else {}

    def _connect(
        self, own_bytes: int, schedules: Sequence[Schedule], before: Mapping[int, ReplicaStore]
    ) -> tuple[list[Sender], list[Receiver]]:
        """Threads that bring snapshots to peers, and that keep those of others.

        Args:
            own_bytes: host memory that this rank's own snapshots take.
            schedules: those that snapshots and logs are of.
            before: what was kept of other ranks in an earlier generation, by rank.
        """
        wiring, transport = self.wiring, self.wiring.snapshots
        if transport is None:
            return [], []
        logs_bytes = max(map(self.windows.log_bytes, schedules))
        allowance = Allowance(self.config.host_memory_bytes - own_bytes - logs_bytes)
        stores = [before.get(one) or ReplicaStore(one, self._device) for one in wiring.sources]
        receivers = [Receiver(wiring.rank, store, transport, allowance, self.reports.report) for store in stores]
        senders = [
            Sender(wiring.rank, peer, transport, self._kept, self._lost, self.reports.report)
            for peer in wiring.peers[wiring.rank]
        ]
        return senders, receivers

    # After a failure

    def disconnect(self) -> None:
        """Everything that talks to other ranks has been aborted: end what did it. Snapshots and logs stay."""
        self._exit.forget()
        for sender in self._senders:
            sender.abandon()
        for receiver in self.checkpointer.replicator.receivers:
            receiver.ended.wait()
        self.disk.interrupted()

    def interrupted(self) -> None:
        """An exception from outside came at any moment; whoever would have restored something may not have."""
        self.commit.interrupted()
        self._replaying = False
        self.windows.pause(False)
        self._go_by(self._settled)

    def _go_by(self, policy: Policy) -> None:
        """Take ``policy`` for this rank's own, whatever was under way."""
        self._settled = policy
        self.windows.adopt(policy)
        self.checkpointer.history = ScheduleHistory(*policy.schedules)

    def keeps(self) -> dict[int, dict[int, str]]:
        """The snapshots that are kept here for others, by their rank: the id of the schedule by iteration."""
        return {
            store.source: {iteration: one.header.schedule for iteration, one in sorted(store.snapshots().items())}
            for store in self.checkpointer.replicator.stores
        }

    def rewire(self, policy: Policy, kept: Sequence[Copies]) -> None:
        """Go on in a new generation; every rank calls it, or makes its :class:`SparseRun`, at the same point.

        Args:
            policy: of its stage; some ranks may have been interrupted in the middle of a decision, and some after it.
            kept: what :meth:`keeps` said, of every rank.
        """
        self._go_by(policy)
        self.wiring = self.windows.wiring = self.disk.wiring = wire(
            self.config, self.views.states, self.job.optimizer, self.wiring, is_running=True
        )
        self._warn_of_copies()
        self.checkpointer.make_room(*policy.schedules)
        before = {store.source: store for store in self.checkpointer.replicator.stores}
        own_bytes = self.checkpointer.capturer.memory_needed(self.checkpointer.history.newest)
        self._senders, receivers = self._connect(own_bytes, self.checkpointer.history.all, before)
        others = [store for source, store in before.items() if source not in self.wiring.sources]
        # What is kept for ranks that have other peers now is of use until they have brought it there.
        self.checkpointer.rewire(self._senders, receivers, self.wiring.agreement, self._peers_have(kept), former=others)
        self.watch.forget_peers()
        self._start_clock()

    def _start_clock(self) -> None:
        config = self.config
        injection.start_clock(
            config.inject_mtbf_s, config.inject_seed, config.inject_trace, config.inject_speedup,
            list(self.wiring.nodes),
        )  # fmt: skip

    def _mark_begun(self, committed: int, boundary: Mapping[str, Any]) -> None:
        mark = self.commit.mark
        if mark is None or mark.iteration != committed:  # the first iteration, or one after some that were left out
            mark = Mark(committed, boundary, {})
        self.commit.mark = replace(mark, resumed=boundary)

    def take_start(self) -> None:
        """Snapshots of the state that the job began from, which this new rank was just built with.

        So a rank that dies before anything of it has reached a peer is recovered like any other.
        """
        schedule = self.checkpointer.history.oldest
        if schedule.start > self.began_at or self.began_at > 0:
            return  # windows have been persisted since; or the state was loaded, and is not what was built
        # Peers have dropped what no way back begins with any more, and would not take it.
        first = max(schedule.start, self.checkpointer.oldest_needed)
        record = {"boundary": boundary_copy(self.job), "iteration": {}}
        for iteration in filter(self.checkpointer.takes, range(first, self.began_at + 1)):
            whole = self._digests_whole(iteration)
            self.checkpointer.take(iteration, record, state=self.began_at, whole=whole)
            self.checkpointer.wait()

    @property
    def copies_missing(self) -> int:
        """Snapshots of this rank, each as often as a peer does not have it yet."""
        return sum(
            peer not in snapshot.acknowledged
            for snapshot in self.checkpointer.own.snapshots().values()
            for peer in self.wiring.peers[self.wiring.rank]
        )

    def begin_anew(self, committed: int) -> None:
        """Before the first iteration after a failure, on every rank: what was counted on the way to it is dropped."""
        self._last_record = self._record_of(committed)
        self.windows.forget()

    def _record_of(self, iteration: int) -> dict[str, Any]:
        """What a replay of ``iteration`` needs, and compares with."""
        sent = self.job.boundary_log.digest(iteration) if self.job.boundary_log is not None else None
        return {"iteration": iteration, "step": self._outcome_of(iteration), "sent": sent}

    def _outcome_of(self, iteration: int) -> Mapping[str, Any]:
        """What came of the step of ``iteration``; nothing if it was not the last one that was committed."""
        mark = self.commit.mark
        return mark.outcome if mark is not None and mark.iteration == iteration else {}

    def _vote(self) -> None:
        """Return when every rank has come to the commit point; at once where a reduction of the step has told so."""
        from megatron.training import get_args

        if restart.generation() is None or (get_args().clip_grad > 0.0 and self.wiring.norm_spans_job):
            return
        dist.barrier(group=self.wiring.job_group)

    def _measure_record(self) -> int:
        """Bytes to set aside for boundary records."""
        _, tensors = plain.flatten(boundary_state(self.job))
        needed = aligned_bytes(StateTensor(BOUNDARY, Saved.FULL, "", tensor) for tensor in tensors)
        return needed + RECORD_SLACK_BYTES

    # Once an iteration

    def begin_iteration(self, committed: int) -> None:
        """Before an iteration: ``state@committed`` is live and nothing of the next iteration has happened."""
        observer.before_iteration(self, committed)
        injection.at(Phase.START)
        if committed in self.config.wipe_at and committed != self.began_at:
            self.wipe_and_recover(committed, self.config.wipe_stages)
        began = time.perf_counter()
        if not self.capturing:
            self.checkpointer.pause(committed)
            self.last_begin_s = 0.0
            return
        self.windows.count()
        # Iterations may be left out (--iterations-to-skip), the first of a window among them.
        window_start = self.checkpointer.history.at(committed).window_start(committed)
        if window_start > self._settled.window_start:
            self.windows.decide(committed, self.checkpointer, self._senders)
            self._settled = self._policy(window_start)
            self.disk.try_again()
        # Of an iteration that was left out there is no record.
        outcome = self._last_record if self._last_record.get("iteration") == committed else {}
        boundary = boundary_copy(self.job)
        self._mark_begun(committed, boundary)
        record = {"boundary": boundary, "iteration": outcome}
        self._forget_before(self._oldest_needed(committed))
        history = self.checkpointer.history
        # Before the first iteration a whole window, so that a run has something to come back to from its start on.
        schedule = history.at(committed)
        before = max(history.oldest.start, schedule.window_start(committed) - schedule.size)
        first = before if self._is_first else committed
        self._is_first = False
        for iteration in range(first, committed + 1):
            self.checkpointer.capture(iteration, record, state=committed, whole=self._digests_whole(iteration))
        self._exit.plan(committed, winding_down=self.checkpointer.progress.is_winding_down)
        injection.at(Phase.SNAPSHOT)
        self.disk.watch()
        self.watch.look(committed, self._senders)
        self.last_begin_s = time.perf_counter() - began
        self.totals.begin_s += self.last_begin_s

    def _oldest_needed(self, committed: int) -> int:
        """The oldest iteration of which logs and records are kept: where the persisted run begins, or a later one.

        Where no window is persisted for long, what a plan could use in the best case is the bound.
        """
        reach = max(map(self.windows.iterations_logged, self.checkpointer.history.all))
        return max(self.checkpointer.progress.persisted, committed + 2 - reach)

    def _forget_before(self, iteration: int) -> None:
        self._recent = {ran: outcome for ran, outcome in self._recent.items() if ran >= iteration}
        if self.job.boundary_log is not None:
            self.job.boundary_log.free_before(iteration)

    def _digests_whole(self, iteration: int) -> bool:
        """Whether ``SS_iteration`` has a digest of the whole state."""
        match self.config.verify:
            case Verify.NOTHING:
                return False
            case Verify.WINDOW:  # where a replay of the window has brought every operator back
                schedule = self.checkpointer.history.at(iteration)
                return iteration == schedule.last_of_run(schedule.window_start(iteration))
            case Verify.ITERATION:
                return True

    def step(self) -> Any:
        """The optimizer step: after the copy, and in an order that a failure leaves whole or undone."""
        if self._replaying:
            return type(self.job.optimizer).step(self.job.optimizer)
        self.totals.stall_s += self.checkpointer.wait()
        if self.job.boundary_log is not None:
            self.job.boundary_log.end()  # here, so that a rank that is interrupted after its step has the whole of it
        result = self.commit.step(self.job.iteration + 1)
        self._recent[self.job.iteration + 1] = self._outcome_of(self.job.iteration + 1)
        if (page := own_page()) is not None:
            page.commit(self.job.iteration + 1)
        return result

    def end_iteration(self, committed: int, step_s: float, outcome: dict[str, Any]) -> None:
        """After an iteration.

        Args:
            committed: its number.
            step_s: seconds that it took.
            outcome: its record: whether it was skipped, gradient norm, losses.
        """
        progress = self.checkpointer.progress
        self.windows.measured(step_s - progress.stall_s)
        self._last_record = {**self._record_of(committed), **outcome}
        self.totals.iterations += 1
        self.totals.train_s += step_s
        self.totals.copied_bytes += progress.copied_bytes
        self.totals.replicated_bytes += progress.replicated_bytes

    def metrics(self) -> dict[str, Any]:
        """What a metrics line says of the last iteration."""
        progress = self.checkpointer.progress
        return {
            "stall_s": progress.stall_s,
            "copied_bytes": progress.copied_bytes,
            "replicated_bytes": progress.replicated_bytes,
            "replication_lag": progress.lag,
            "persisted_from": None if progress.persisted == NONE else progress.persisted,
            "window": self.checkpointer.history.newest.size,
            "windows_abandoned": progress.abandoned,
            "snapshot_memory_bytes": progress.memory_bytes,
            "log_bytes": self.job.boundary_log.bytes_of_last if self.job.boundary_log else 0,
            "log_memory_bytes": self.job.boundary_log.memory_bytes if self.job.boundary_log else 0,
            "on_disk": self.disk.newest,
        }

    # Coming back

    def recover(self, until: int, lost: frozenset[int] | None = None) -> Recovery:
        """Bring ``state@until`` back, whatever is in live memory; every rank calls it.

        Args:
            until: the iteration.
            lost: the pipeline stages whose state is gone; the others keep theirs, feed them, and wait. Nothing for all.

        Raises:
            RecoveryError: there is no way back, or what came back is not what was lost.
        """
        return self._replay(lambda parts: recovery.carry_out(parts, self.prepare(until, lost)))

    def prepare(self, until: int, lost: frozenset[int] | None) -> recovery.Prepared:
        """Plan the way back to ``state@until`` and fetch what it needs; every rank calls it.

        Raises:
            RecoveryError: there is no way back. On every rank alike.
        """
        memory = recovery.MemoryShelf(self.checkpointer)
        shelves = {Source.MEMORY: memory, Source.PEER: memory}
        scope = None if lost is None else self._scope(lost)
        report = Report(
            self.wiring.rank,
            self.wiring.stage,
            (),
            logged=self._logged(scope),
            outcomes=self._outcomes(until),
            replica=min(dist.get_process_group_ranks(_model_replica())),
        )
        self.checkpointer.capturer.settle()
        try:
            return recovery.prepare(report, shelves, until, self.wiring.fetches, scope)
        except RecoveryError as gone:  # on every rank alike
            on_disk = self.disk.that_lead_to(until)
            if not on_disk.windows:
                raise
            return self._prepare_from_disk(report, shelves | {Source.FILE: on_disk}, until, gone)

    def _prepare_from_disk(
        self, report: Report, shelves: Mapping[Source, recovery.Shelf], until: int, gone: RecoveryError
    ) -> recovery.Prepared:
        """All stages roll back to a window on disk and replay from there; every rank calls it.

        What single ranks remember of steps is left out: with all stages replaying every step is worked out again, by
        all ranks or by none.

        Raises:
            RecoveryError: there is no way back from disk either.
        """
        prepared = recovery.prepare(report, shelves, until, self.wiring.fetches)
        assert prepared.mine is not None
        first, sources = prepared.mine.first, prepared.mine.sources()
        windows = shelves[Source.FILE].windows  # type: ignore[attr-defined]
        name = next((one.name for one in windows if one.first <= first <= one.last), "a window")
        self.reports.warn(
            "recovery_from_disk", f"memory and peers cannot bring iteration {until} back ({gone}). All ranks fall back "
            f"to {name} on disk and replay iterations {prepared.mine.begins + 1} to {until}; {sources[Source.FILE]} "
            "snapshots come from files", window=name, until=until,
        )  # fmt: skip
        return replace(prepared, outcomes={})

    def _logged(self, scope: recovery.Scope | None) -> tuple[int, ...]:
        """Iterations whose log is whole; if this stage is to feed others, every byte of it is checked."""
        log = self.job.boundary_log
        if log is None:
            return ()
        if scope is None or self.wiring.stage not in scope.feeding:
            return tuple(log.iterations)
        damaged = log.damaged(log.iterations)
        if damaged:
            self.reports.report(f"what iterations {', '.join(map(str, damaged))} sent is damaged in host memory")
        return tuple(iteration for iteration in log.iterations if iteration not in damaged)

    def _outcomes(self, until: int) -> dict[int, Any]:
        """What came of the iterations that this rank's snapshots have a record of, and of the last one."""
        records = (snapshot.record()["iteration"] for snapshot in self.checkpointer.own.snapshots().values())
        outcomes = {record["iteration"]: {"step": record["step"]} for record in records if record}
        outcomes |= {iteration: {"step": outcome} for iteration, outcome in self._recent.items() if outcome}
        if last := self._outcome_of(until):
            outcomes[until] = {"step": last}
        return outcomes

    def carry_out(self, prepared: recovery.Prepared) -> Recovery:
        """Replay what :meth:`prepare` has prepared; every rank calls it, inside Megatron's training loop."""
        records = (snapshot.record()["iteration"] for snapshot in prepared.snapshots.values())
        told = {record["iteration"]: record for record in records if record} | dict(prepared.outcomes)
        self._recent = {iteration: one["step"] for iteration, one in told.items()} | self._recent
        return self._replay(lambda parts: recovery.carry_out(parts, prepared))

    def check_kept(self, until: int, prepared: recovery.Prepared | None) -> Kept:
        """Compare what ranks kept with what is known of it; every rank calls it. See :func:`kept.check_kept`.

        Args:
            until: the iteration whose state is live on every rank.
            prepared: what was replayed; nothing if no rank lost its state.
        """
        return check_kept(
            self._parts(), until, is_kept=prepared is None or prepared.mine is None,
            replicas_are_known=prepared is not None,
        )  # fmt: skip

    def _parts(self) -> recovery.Parts:
        return recovery.Parts(self.job, self.wiring, self.views, self.checkpointer)

    def _scope(self, lost: frozenset[int]) -> recovery.Scope | None:
        """What rolls back for ``lost`` stages; nothing, with the reason told, if all stages must."""
        from megatron.training import get_args

        args = get_args()
        if args.calculate_per_token_loss:
            if self.wiring.rank == 0:
                self.reports.report(
                    "all stages roll back: --calculate-per-token-loss needs the token count of the last stage"
                )
            return None
        return recovery.Scope(self.wiring.pipeline, lost, args.iterations_to_skip)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Iterations that run meanwhile are no progress: they are neither captured nor counted."""
        self._replaying = True
        self.windows.pause(True)
        try:
            yield
        finally:
            self._replaying = False
            self.windows.pause(False)

    def begin_training(self) -> None:
        """Inside Megatron's training loop, before its first iteration; every rank calls it.

        After a failure it is not called: there is more to do then.
        """
        if loaded := self._loaded:
            self.carry_out(loaded.prepared)
            self._loaded = None  # its host memory is free again
        self.commit.mark = Mark(self.job.iteration, boundary_copy(self.job), {})

    def _replay(self, way: Callable[[recovery.Parts], Recovery]) -> Recovery:
        with self.replaying():
            done = way(self._parts())
        self.recoveries.append(done)
        if self.wiring.rank == 0 and self.job.comeback is None:  # else it is told with everything around it
            print(f"moevement: {done.sentence()}", flush=True)
        self.job.event("recovery", **done.as_dict())
        return done

    def wipe_and_recover(self, committed: int, stages: frozenset[int] | None) -> Recovery:
        """The injected fault: ranks forget all they know, and what comes back is compared with what was there.

        Every rank calls it between two iterations.

        Args:
            committed: the iteration whose state is live.
            stages: those whose ranks forget; nothing for all.

        Raises:
            RecoveryError: it did not come back.
        """
        before = self._everything_digest()
        if self.wiring.rank == 0:
            where = "every rank" if stages is None else f"stage {', '.join(map(str, sorted(stages)))}"
            print(f"moevement: wiping the state of iteration {committed} on {where}, as was asked for", flush=True)
        self.checkpointer.wait()
        self.checkpointer.capturer.settle()
        if stages is None or self.wiring.stage in stages:
            wipe.wipe(self.job, self.views)
        done = self.recover(committed, stages)
        after = self._everything_digest()
        wrong = [part for part in before if before[part] != after[part]]
        everyones = tell_all(wrong)
        if any(everyones):
            raise RecoveryError(
                f"the state of iteration {committed} did not come back as it was before it was wiped: "
                + "; ".join(f"rank {rank}: {', '.join(parts[:5])}" for rank, parts in enumerate(everyones) if parts)
            )
        return done

    def _everything_digest(self) -> dict[str, str]:
        boundary = boundary_state(self.job)
        return self.checkpointer.capturer.whole_now() | {part: digest(value) for part, value in boundary.items()}

    # What an operator of the job sees

    def _kept(self, snapshot: Any, peer: int) -> None:
        self.checkpointer.own.acknowledged(snapshot, peer)

    def _lost(self, snapshot: Any) -> None:
        self.checkpointer.own.undelivered(snapshot)

    def _warn_of_copies(self) -> None:
        if self.wiring.rank == 0 and self.wiring.warning is not None:
            self.reports.report(self.wiring.warning)

    # The end

    def finish(self) -> dict[str, Any]:
        """Bring what is under way to the peers and say what checkpointing cost; every rank calls it."""
        injection.at(Phase.EXIT, self.job.iteration)
        if not self.checkpointer.close(timeout_s=self.config.peer_timeout_s):
            self.reports.report("not all peers took the last snapshots in time")
        on_disk = self.disk.close()
        decided = (self.windows.windows, self.windows.reorders, self.watch.longest_unpersisted)
        warnings = tell_all(self.reports.warnings)
        told = tell_all((self.totals, self.checkpointer.progress, on_disk, decided))
        totals, progress, disk, decisions = ([one[part] for one in told] for part in range(4))
        newest_on_disk = min(one[0] for one in disk)
        longest_s = max(one.train_s for one in totals) or 1.0
        persisted = min(one.persisted for one in progress)
        return {
            "stall_s": max(one.stall_s for one in totals),
            "stall_share": max(one.stall_s for one in totals) / longest_s,
            "training_thread_s": max(one.begin_s for one in totals),
            "training_thread_share": max(one.begin_s for one in totals) / longest_s,
            "copied_bytes": sum(one.copied_bytes for one in totals),
            "replicated_bytes": sum(one.replicated_bytes for one in totals),
            "window": self.checkpointer.history.newest.size,
            "windows": max(one[0] for one in decisions),
            "windows_abandoned": sum(one.abandoned for one in progress),
            "reorders": max(one[1] for one in decisions),
            "persisted_from": None if persisted == NONE else persisted,
            "longest_unpersisted": max(one[2] for one in decisions),
            "memory_bytes": max(one.memory_bytes for one in progress),
            "recoveries": [one.as_dict() for one in self.recoveries],
            "on_disk": None if newest_on_disk == NONE else newest_on_disk,
            "disk_windows_failed": max(one[1] for one in disk),
            "disk_bytes": sum(one[2] for one in disk),
            "disk_s": max(one[3] for one in disk),
            "warnings": max(warnings, key=len),  # a rank that joined later knows fewer
        }


def _model_replica() -> Any:
    """The ranks of this rank's model replica, through all stages."""
    from megatron.core import parallel_state

    return parallel_state.get_model_parallel_group()


def start(job: Job, config: SparseConfig, loaded: Loaded | None, **joining: Any) -> SparseRun:
    """Begin sparse checkpointing of ``job`` and put the wait in front of its optimizer step.

    Args:
        job: this rank's.
        config: the flags.
        loaded: the window that the job starts from, if it starts from one.
        joining: what a rank knows that joins a running job: ``adopted``, ``same_stage``, ``kept``.
    """
    run = SparseRun(job, config, loaded, **joining)
    step = job.optimizer.step

    @functools.wraps(step)
    def step_after_copy() -> Any:
        return run.step()

    job.optimizer.step = step_after_copy
    return run
