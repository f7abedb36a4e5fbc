"""One rank's fault tolerance: what is asked of the engine in every iteration, and after a failure.

Before iteration t+1 the boundary record is made and ``SS_t`` begins; before its optimizer step the copy must be over;
at a window's beginning order and window may change (``windows.py``). No other collective is made for it than those
there, and one that nobody waits for each iteration (``GroupAgreement``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from moevement_core.boundary_log import BoundaryLog
from moevement_core.device import current_device
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.layout import buffer_bytes
from moevement_core.injection import Phase
from moevement_core.policy.schedule import Saved, Schedule, ScheduleHistory
from moevement_core.rendezvous.status_page import own_page
from moevement_core.restart import injection
from moevement_core.restart.generation import generation
from moevement_core.session import observer
from moevement_core.session.binding import Binding
from moevement_core.session.commit import Mark
from moevement_core.session.config import SessionConfig, Verify
from moevement_core.session.drill import wipe_and_recover
from moevement_core.session.identity import JobNames
from moevement_core.session.parts import Parts
from moevement_core.session.peers import Copies, Peers, peers_have
from moevement_core.session.policy import Policy
from moevement_core.session.progress_watch import ProgressWatch
from moevement_core.session.recoverer import Recoverer
from moevement_core.session.reports import Reports
from moevement_core.session.step_records import StepRecords
from moevement_core.session.topology import Topology, connect
from moevement_core.session.totals import Totals, summary
from moevement_core.session.window_files import Loaded
from moevement_core.session.windows import WindowDecisions
from moevement_core.session.windows_on_disk import WindowsOnDisk
from moevement_core.snapshot import plain
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.snapshot import BOUNDARY, StateTensor, aligned_bytes

RECORD_SLACK_BYTES = 64 << 10
"""Room for a boundary record to grow."""


@dataclass(frozen=True)
class Joining:
    """What a rank knows that joins a running job."""

    policy: Policy
    """Of a stage."""
    is_of_same_stage: bool
    """Whether of this rank's."""
    kept: Sequence[Copies]
    """What every rank keeps for others."""


class Session:
    """Sparse checkpointing of one rank. Every rank makes one at the same point and calls alike.

    Args:
        binding: the trainer.
        config: the flags.
        names: of the job.
        loaded: the window that the job starts from, if it starts from one.
        joining: what a replacement knows of the running job; None where the job starts.
    """

    def __init__(
        self,
        binding: Binding,
        config: SessionConfig,
        names: JobNames,
        loaded: Loaded | None = None,
        joining: Joining | None = None,
    ) -> None:
        self.binding, self.config = binding, config
        self.topology = connect(config, binding, is_running=joining is not None)
        self.reports = Reports(binding, self.topology.rank)
        self._warn_of_copies()
        self._device = current_device()
        self._states = binding.states()
        self.began_at = binding.iteration if joining is None else joining.policy.began_at
        self.windows = self._window_decisions(joining)
        self.peers = Peers(self._device, lambda: self.checkpointer.own, self.reports.report)
        self.checkpointer = self._start_checkpointer(joining)
        disk_job, announced = (joining.policy.disk_job, joining.policy.announced) if joining else ("", NONE)
        self.disk = WindowsOnDisk(binding, names, config, self.topology, self.checkpointer, self.reports, disk_job)
        self.watch = ProgressWatch(
            binding.iteration, self.checkpointer, self.reports, config.timeouts.peer_s, announced
        )  # fmt: skip
        self._settled = self._joined_policy(joining) if joining is not None else self._policy(binding.iteration)
        """As of the last window whose decisions this rank has come to the end of: others may still be in the middle."""
        self._loaded = loaded
        if joining is None:
            self.peers.refuse_without_copies(self.topology, config.timeouts.peer_s, config.copies.replicas)
            self.disk.start()
        if self.topology.pipeline.stages > 1:
            binding.boundary_log = BoundaryLog(self._device, self._log_cap_bytes(), self.reports.report)
        self.commit = binding.commit_point(self._vote)
        self.records = StepRecords(self.commit, binding.boundary_log, self.checkpointer.own)
        self.recoverer = Recoverer(lambda: self.parts, self.records, self.disk, self.reports, self.windows.pause)
        self.totals = Totals()
        self._is_first = joining is None
        injection.begin(config.drill.faults, lambda: binding.iteration)
        self._start_clock()

    # Once

    @property
    def parts(self) -> Parts:
        """What a recovery needs of this rank, in this generation."""
        return Parts(self.binding, self.topology, self._states, self.checkpointer)

    def _window_decisions(self, joining: Joining | None) -> WindowDecisions:
        config, table = self.config, self.topology.table
        strategy = config.strategy.of(table)
        counts = self.binding.counts(table, strategy.counts) if strategy.counts is not None else None
        windows = WindowDecisions(
            strategy, counts, self.topology, config.budget, self.reports.report, self.binding.sent_bytes,
            asked_window=config.strategy.window, to_disk=config.disk.persist_dir is not None,
        )  # fmt: skip
        if joining is not None:
            windows.adopt(self._joined_policy(joining, windows))
        return windows

    def _joined_policy(self, joining: Joining, windows: WindowDecisions | None = None) -> Policy:
        if joining.is_of_same_stage:
            return joining.policy
        strategy = (windows or self.windows).strategy
        return joining.policy.for_stage(strategy.first(0, self.topology.most_operators), strategy.learned())

    def _policy(self, window_start: int) -> Policy:
        windows = self.windows
        return Policy(
            window_start, self.checkpointer.history.all, windows.strategy.learned(), windows.strategy.settled,
            self.watch.announced, self.began_at, self.disk.job_name, self.checkpointer.needed,
        )  # fmt: skip

    def _start_checkpointer(self, joining: Joining | None) -> Checkpointer:
        record_bytes = self._measure_record()

        def bytes_of(schedule: Schedule) -> int:
            return int(buffer_bytes(schedule, self._states, record_bytes))

        if joining is not None:
            history = ScheduleHistory(*self._joined_policy(joining).schedules)
        else:
            history = self.windows.first(self.binding.iteration, bytes_of)
        own_bytes = max(map(self.windows.slots, history.all)) * max(map(bytes_of, history.all))
        budget = self._budget_for_copies(own_bytes, history.all)
        senders, receivers = self.peers.connect(self.topology, budget, {})
        return Checkpointer(
            self.topology.rank,
            self._states,
            self.windows.strategy,
            history,
            self._device,
            senders,
            receivers,
            self.topology.agreement,
            record_bytes,
            self.reports.report,
            to_disk=self.config.disk.persist_dir is not None,
            has=peers_have(self.topology, joining.kept if joining is not None else ()),
            needed=joining.policy.needed if joining is not None else (NONE, NONE),
        )

    def _budget_for_copies(self, own_bytes: float, schedules: Sequence[Schedule]) -> float:
        """Host memory that is left for copies of other ranks' snapshots, beside own ones and the log."""
        return self.config.budget.host_memory_bytes - own_bytes - max(map(self.windows.log_bytes, schedules))

    def _log_cap_bytes(self) -> float:
        """What is left for the log beside snapshots; at least what was set aside for it."""
        budget, checkpointer = self.config.budget, self.checkpointer
        aside = max(map(self.windows.log_bytes, checkpointer.history.all))
        snapshots = checkpointer.capturer.memory_needed(checkpointer.history.newest)
        left = budget.host_memory_bytes - snapshots - checkpointer.replicator.memory_bytes
        return min(budget.log_memory_bytes, max(left, aside))

    def _measure_record(self) -> int:
        """Bytes to set aside for boundary records."""
        _, tensors = plain.flatten(self.binding.boundary())
        needed = aligned_bytes(StateTensor(BOUNDARY, Saved.FULL, "", tensor) for tensor in tensors)
        return needed + RECORD_SLACK_BYTES

    def _warn_of_copies(self) -> None:
        if self.topology.rank == 0 and self.topology.warning is not None:
            self.reports.report(self.topology.warning)

    def _start_clock(self) -> None:
        drill = self.config.drill
        injection.start_clock(drill.mtbf_s, drill.seed, drill.trace, drill.speedup, list(self.topology.nodes))

    def _vote(self) -> None:
        """Return when every rank has come to the commit point; at once where a reduction of the step made sure."""
        if generation() is None or self.topology.step_spans_job:
            return
        dist.barrier(group=self.topology.job_group)

    # Once an iteration

    def begin_training(self) -> None:
        """Inside the training loop, before its first iteration; after a failure there is more to do than this."""
        if loaded := self._loaded:
            self.recoverer.carry_out(loaded.prepared)
            self._loaded = None  # its host memory is free again
        self.commit.mark = Mark(self.binding.iteration, self.binding.boundary_copy(), {})

    def begin_iteration(self, committed: int) -> None:
        """Before an iteration: ``state@committed`` is live and nothing of the next iteration has happened."""
        observer.observer.before_iteration(self, committed)
        injection.at(Phase.START)
        if committed in self.config.drill.wipe_at and committed != self.began_at:
            wipe_and_recover(self.parts, self.recoverer, committed, self.config.drill.wipe_stages)
        began = time.perf_counter()
        if not observer.observer.is_capturing:
            self.checkpointer.pause(committed)
            self.totals.last_begin_s = 0.0
            return
        self.windows.count()
        self._decide(committed)
        boundary = self.binding.boundary_copy()
        self._mark_begun(committed, boundary)
        self._forget_before(self._oldest_needed(committed))
        self._capture(committed, {"boundary": boundary, "iteration": self.records.of_last(committed)})
        self.binding.plan_exit(committed, is_winding_down=self.checkpointer.progress.is_winding_down)
        injection.at(Phase.SNAPSHOT)
        self.disk.watch()
        self.watch.look(committed, self.peers.senders)
        self.totals.began(time.perf_counter() - began)

    def _decide(self, committed: int) -> None:
        # Iterations may be left out (--iterations-to-skip), the first of a window among them.
        window_start = self.checkpointer.history.at(committed).window_start(committed)
        if window_start > self._settled.window_start:
            self.windows.decide(committed, self.checkpointer, self.peers.senders)
            self._settled = self._policy(window_start)
            self.disk.try_again()

    def _mark_begun(self, committed: int, boundary: Mapping[str, Any]) -> None:
        mark = self.commit.mark
        if mark is None or mark.iteration != committed:  # the first iteration, or one after some that were left out
            mark = Mark(committed, boundary, {})
        self.commit.mark = replace(mark, resumed=boundary)

    def _capture(self, committed: int, record: Mapping[str, Any]) -> None:
        """``SS_committed``; before the first iteration a whole window: a run is recoverable from its start on."""
        history = self.checkpointer.history
        schedule = history.at(committed)
        before = max(history.oldest.start, schedule.window_start(committed) - schedule.size)
        first = before if self._is_first else committed
        self._is_first = False
        for iteration in range(first, committed + 1):
            self.checkpointer.capture(iteration, record, state=committed, whole=self._digests_whole(iteration))

    def _oldest_needed(self, committed: int) -> int:
        """The oldest iteration of which logs and records are kept: where the persisted run begins, or a later one.

        Where no window is persisted for long, what a plan could use in the best case is the bound.
        """
        reach = max(map(self.windows.iterations_logged, self.checkpointer.history.all))
        return max(self.checkpointer.progress.persisted, committed + 2 - reach)

    def _forget_before(self, iteration: int) -> None:
        self.records.forget_before(iteration)
        if self.binding.boundary_log is not None:
            self.binding.boundary_log.free_before(iteration)

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
        self.totals.stall_s += self.checkpointer.wait()
        if self.binding.boundary_log is not None:
            self.binding.boundary_log.end()  # here, so that a rank interrupted after its step has the whole of it
        iteration = self.binding.iteration + 1
        result = self.commit.step(iteration)
        self.records.committed(iteration)
        if (page := own_page()) is not None:
            page.commit(iteration)
        return result

    def end_iteration(self, committed: int, step_s: float, outcome: Mapping[str, Any]) -> None:
        """After an iteration.

        Args:
            committed: its number.
            step_s: seconds that it took.
            outcome: its record: whether it was skipped, gradient norm, losses.
        """
        progress = self.checkpointer.progress
        self.windows.measured(step_s - progress.stall_s)
        self.records.ended(committed, outcome)
        self.totals.ended(step_s, progress)

    def metrics(self) -> dict[str, Any]:
        """What a metrics line says of the last iteration."""
        progress, log = self.checkpointer.progress, self.binding.boundary_log
        return {
            "stall_s": progress.stall_s,
            "copied_bytes": progress.copied_bytes,
            "replicated_bytes": progress.replicated_bytes,
            "replication_lag": progress.lag,
            "persisted_from": None if progress.persisted == NONE else progress.persisted,
            "window": self.checkpointer.history.newest.size,
            "windows_abandoned": progress.abandoned,
            "snapshot_memory_bytes": progress.memory_bytes,
            "log_bytes": log.bytes_of_last if log is not None else 0,
            "log_memory_bytes": log.memory_bytes if log is not None else 0,
            "on_disk": self.disk.newest,
        }

    # After a failure

    def disconnect(self) -> None:
        """Everything that talks to other ranks has been aborted: end what did it. Snapshots and logs stay."""
        self.binding.plan_exit(self.binding.iteration, is_winding_down=False)
        self.peers.disconnect(self.checkpointer.replicator.receivers)
        self.disk.interrupted()

    def interrupted(self) -> None:
        """An exception from outside came at any moment; whoever would have restored something may not have."""
        self.commit.interrupted()
        self.recoverer.interrupted()
        self._go_by(self._settled)

    def policy(self) -> Policy:
        """What this rank has decided with the others of its stage; a decision that is under way is left out."""
        return replace(
            self._settled, announced=self.watch.announced, disk_job=self.disk.job_name, needed=self.checkpointer.needed
        )

    def keeps(self) -> dict[int, dict[int, str]]:
        """The snapshots that are kept here for others, by their rank: the id of the schedule by iteration."""
        return {
            store.source: {iteration: one.header.schedule for iteration, one in sorted(store.snapshots().items())}
            for store in self.checkpointer.replicator.stores
        }

    def rewire(self, policy: Policy, kept: Sequence[Copies]) -> None:
        """Go on in a new generation; every rank calls it, or makes its :class:`Session`, at the same point.

        Args:
            policy: of its stage; some ranks may have been interrupted in the middle of a decision, and some after it.
            kept: what :meth:`keeps` gave, of every rank.
        """
        self._go_by(policy)
        checkpointer = self.checkpointer
        self.topology = self.windows.topology = self.disk.topology = self._reconnect(self.topology)
        self._warn_of_copies()
        checkpointer.make_room(*policy.schedules)
        before = {store.source: store for store in checkpointer.replicator.stores}
        own_bytes = checkpointer.capturer.memory_needed(checkpointer.history.newest)
        budget = self._budget_for_copies(own_bytes, checkpointer.history.all)
        senders, receivers = self.peers.connect(self.topology, budget, before)
        others = [store for source, store in before.items() if source not in self.topology.sources]
        # What is kept for ranks that have other peers now is of use until they have brought it there.
        has = peers_have(self.topology, kept)
        checkpointer.rewire(senders, receivers, self.topology.agreement, has, former=others)
        self.watch.forget_peers()
        self._start_clock()

    def _reconnect(self, before: Topology) -> Topology:
        return connect(self.config, self.binding, before, is_running=True)

    def _go_by(self, policy: Policy) -> None:
        """Take ``policy`` for this rank's own, whatever was under way."""
        self._settled = policy
        self.windows.adopt(policy)
        self.checkpointer.history = ScheduleHistory(*policy.schedules)

    def take_start(self) -> None:
        """Snapshots of the state that the job began from, which this new rank was just built with.

        So a rank that dies before anything of it has reached a peer is recovered like any other.
        """
        schedule = self.checkpointer.history.oldest
        if schedule.start > self.began_at or self.began_at > 0:
            return  # windows have been persisted since; or the state was loaded, and is not what was built
        # Peers have dropped what no way back begins with any more, and would not take it.
        first = max(schedule.start, self.checkpointer.oldest_needed)
        record = {"boundary": self.binding.boundary_copy(), "iteration": {}}
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
            for peer in self.topology.peers[self.topology.rank]
        )

    def go_on(self, committed: int) -> None:
        """Before the first iteration after a failure, on every rank: what was counted on the way to it is dropped."""
        self.records.resumed(committed)
        self.windows.forget()

    # The end

    def finish(self) -> dict[str, Any]:
        """Bring what is under way to the peers; returns what checkpointing cost. Every rank calls it."""
        injection.at(Phase.EXIT, self.binding.iteration)
        if not self.checkpointer.close(timeout_s=self.config.timeouts.peer_s):
            self.reports.report("not all peers took the last snapshots in time")
        on_disk = self.disk.close()
        decided = (self.windows.windows, self.windows.reorders, self.watch.longest_unpersisted)
        return summary(
            self.totals, self.checkpointer.progress, on_disk, decided, self.reports.warnings, self.recoverer.done,
            self.checkpointer.history.newest.size,
        )  # fmt: skip
