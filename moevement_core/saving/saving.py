"""Saving of one rank's snapshots, window by window, through all generations of the job."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moevement_core.comms import plain
from moevement_core.comms.address import own_address
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.device import current_device
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.config import KeepOwn, Verify
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.errors import ConfigError
from moevement_core.overhead.meter import OverheadMeter
from moevement_core.overhead.pause import Pause
from moevement_core.policy.schedule import Saved, Schedule, ScheduleHistory, is_other_window
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.replication.allowance import LOG, Allowance
from moevement_core.replication.interface import bytes_moved
from moevement_core.replication.pace import Pace
from moevement_core.restart.generation import generation
from moevement_core.run.events import Planned
from moevement_core.saving.identity import JobNames
from moevement_core.saving.peers import Copies, Peers, ask_peers
from moevement_core.saving.progress_watch import ProgressWatch
from moevement_core.saving.reports import Reports
from moevement_core.saving.stage_policy import Policy
from moevement_core.saving.windows import WindowDecisions
from moevement_core.saving.windows_on_disk import WindowsOnDisk
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.snapshot import BOUNDARY, StateTensor, aligned_bytes
from moevement_core.strategies import Strategy
from moevement_core.strategies.config import StrategyConfig
from moevement_core.topology.host_budget import allowed
from moevement_core.topology.parts import Parts
from moevement_core.topology.topology import connect
from moevement_core.trainer.binding import Binding
from moevement_core.trainer.config import SessionConfig

RECORD_SLACK_BYTES = 64 << 10
"""Bytes by which a boundary record may grow after it was measured."""


@dataclass(frozen=True)
class Joining:
    """Information that a rank needs to join a running job."""

    policy: Policy
    """Decisions of this rank's stage, or of another stage if no rank of this stage survived."""
    is_of_same_stage: bool
    """True if :attr:`policy` belongs to this rank's stage."""

    def policy_for(self, strategy: Strategy, most_operators: int) -> Policy:
        """Return the policy of this rank's stage.

        If no rank of the stage survived, this is the policy of another stage with the order in which ``strategy``
        begins.

        Args:
            strategy: strategy of this rank's stage.
            most_operators: largest number of operators of any rank of the job.
        """
        if self.is_of_same_stage:
            return self.policy
        return self.policy.for_stage(strategy.first(0, most_operators), strategy.learned())


class Saving:
    """Saving of one rank's snapshots.

    Collective: all ranks create an instance at the same point, and call each method in the same order.

    Args:
        binding: binding of the trainer.
        config: flags of the job.
        names: names that identify the job and the state of its windows on disk.
        joining: information about the running job, on a replacement; None if the job starts.
        is_resized: True if the job continues with another number of ranks. The job then does not end if it has too few
            ranks for the copies that the flags ask for; it keeps fewer copies.
    """

    def __init__(
        self,
        binding: Binding,
        config: SessionConfig,
        names: JobNames,
        joining: Joining | None,
        *,
        is_resized: bool = False,
    ) -> None:
        self._binding, self._config = binding, config
        self.topology = connect(config, binding, is_running=joining is not None or is_resized)
        self.reports = Reports(binding, self.topology.rank)
        self._warn_of_copies()
        self.began_at = binding.iteration if joining is None else joining.policy.began_at
        """Iteration that the job started from."""
        if joining is None:
            refuse_what_is_not_defined(binding, config.strategy)
        self.allowed = allowed(
            config.budget, self.topology.nodes, self.topology.rank, is_bounded=not config.strategy.selects
        )
        """Host memory that this rank may use."""
        self.allowance = Allowance(self.allowed.nbytes)
        strategy = self._strategy()
        if joining is None and (caution := strategy.caution()) is not None and self.topology.rank == 0:
            self.reports.report(caution)
        policy = None if joining is None else joining.policy_for(strategy, self.topology.most_operators)
        pace = None
        if strategy.paces_copies and (moved := bytes_moved(own_address(config.copies.interfaces))) is not None:
            pace = Pace(moved)
        self._pause = Pause()
        self.meter = OverheadMeter(self.began_at, self._pause)
        """Meter of the training time that saving costs."""
        self.windows = self._window_decisions(strategy, policy)
        self.policy_s = 0.0
        """Seconds that the last call of :meth:`decide` took."""
        self.peers = Peers(
            device=current_device(),
            own=lambda: self.checkpointer.own,
            report=self.reports.report,
            pace=pace,
            pause=self._pause,
        )
        self._states = binding.states()
        self.checkpointer = self._start_checkpointer(policy, is_resized=is_resized)
        is_auto, has_parity = config.budget.keep_own is KeepOwn.AUTO, config.copies.protection.parity is not None
        self.checkpointer.may_give_up_own = is_auto and config.disk.persist_dir is None and not has_parity
        disk_job, announced = (policy.disk_job, policy.announced) if policy is not None else ("", NONE)
        self.disk = WindowsOnDisk(
            binding,
            names,
            config=config,
            topology=self.topology,
            checkpointer=self.checkpointer,
            reports=self.reports,
            job_name=disk_job,
        )
        self.watch = ProgressWatch(
            checkpointer=self.checkpointer,
            reports=self.reports,
            peer_timeout_s=config.timeouts.peer_s,
            announced=announced,
            meter=self.meter,
            cap=config.strategy.kept_cap,
        )
        self._settled = policy or self._policy(binding.iteration)
        """Newest decisions that this rank has completed; other ranks may still be deciding."""
        if joining is None:
            self.peers.refuse_without_copies(self.topology, config.timeouts.peer_s, config.copies.replicas)
            self.disk.start()
            self._record_plan()

    # Once

    @property
    def parts(self) -> Parts:
        """Objects that a recovery needs: binding, topology of this generation, operator states and checkpointer."""
        return Parts(self._binding, self.topology, self._states, self.checkpointer)

    @property
    def may_redo(self) -> bool:
        """True if a failed rank may recover by redo: it alone repeats updates from logged gradients."""
        return self._config.strategy.may_redo

    def _window_decisions(self, strategy: Strategy, policy: Policy | None) -> WindowDecisions:
        config = self._config
        counts = self._binding.counts(self.topology.table, strategy.counts) if strategy.counts is not None else None
        share = config.strategy.capacity_boost
        room = None if share is None else self._binding.expert_room(self.topology.table, share)
        windows = WindowDecisions(
            strategy, meter=self.meter, counts=counts, room=room, topology=self.topology, budget=config.budget,
            allowed=self.allowed, report=self.reports.report,
            sent_bytes=0 if strategy.rolls_back_all else self._binding.sent_bytes, asked_window=config.strategy.window,
            to_disk=config.disk.persist_dir is not None, began_at=self.began_at,
            default_cap=config.strategy.default_cap,
        )  # fmt: skip
        if policy is not None:
            windows.join(policy)
        return windows

    def _policy(self, window_start: int) -> Policy:
        windows = self.windows
        return Policy(
            window_start, schedules=self.checkpointer.history.all, learned=windows.strategy.learned(),
            settled=windows.strategy.settled, announced=self.watch.announced, began_at=self.began_at,
            disk_job=self.disk.job_name, needed=self.checkpointer.needed,
            keeps_own_copies=self.checkpointer.memory.keeps_own_copies,
        )  # fmt: skip

    def _start_checkpointer(self, policy: Policy | None, *, is_resized: bool) -> Checkpointer:
        memory = SnapshotMemory(
            self._states, self._measure_record(), to_disk=self._config.disk.persist_dir is not None,
            is_summed=self._config.copies.protection.parity is not None,
        )  # fmt: skip
        if policy is not None:
            history, memory.keeps_own_copies = ScheduleHistory(*policy.schedules), policy.keeps_own_copies
        else:
            history = self.windows.first(self._binding.iteration, memory, is_running=is_resized)
        self._set_aside_for_log(history.all)
        senders, receivers = self.peers.connect(self.topology, self.allowance, ())
        return Checkpointer(
            rank=self.topology.rank,
            states=self._states,
            strategy=self.windows.strategy,
            history=history,
            device=current_device(),
            senders=senders,
            receivers=receivers,
            agreement=self.topology.channels.agreement,
            memory=memory,
            allowance=self.allowance,
            report=self.reports.report,
            has=ask_peers(self.topology, {}) if policy is not None else {},
            needed=policy.needed if policy is not None else (NONE, NONE),
            pause=self._pause,
        )

    def _set_aside_for_log(self, schedules: Sequence[Schedule]) -> None:
        self.allowance.keep(LOG, max(map(self.windows.log_bytes, schedules)))

    def log_cap_bytes(self) -> float:
        """Return the bytes of host memory that the boundary log may use.

        The log may use all memory that snapshots do not use, but at most ``log_memory_bytes`` of the budget.
        """
        return min(self._config.budget.log_memory_bytes, self.allowance.left_for(LOG))

    def share_memory_with(self, log: BoundaryLog) -> None:
        """Let snapshots take host memory from the boundary log ``log`` when memory runs out."""

        def give_up(nbytes: int) -> None:
            less = max(0.0, self.allowance.of(LOG) - nbytes)
            self.allowance.keep(LOG, less)
            log.give_up(less)

        self.checkpointer.give_up_log = give_up

    def _measure_record(self) -> int:
        """Return the bytes to reserve for boundary records."""
        _, tensors = plain.flatten({"boundary": self._binding.boundary(), **self.learned()})
        needed = aligned_bytes(StateTensor(BOUNDARY, Saved.FULL, "", tensor) for tensor in tensors)
        return needed + RECORD_SLACK_BYTES

    def _warn_of_copies(self) -> None:
        if self.topology.rank == 0 and self.topology.warning is not None:
            self.reports.report(self.topology.warning)

    # Once an iteration

    def decide(self, committed: int) -> None:
        """Decide the order of operators and the window, if a window begins. Called before every iteration."""
        began_s = time.perf_counter()
        # The job may leave out iterations (--iterations-to-skip), even the first iteration of a window.
        window_start = self.checkpointer.history.at(committed).decided_at(committed)
        if window_start > self._settled.window_start:
            before = self.checkpointer.history.newest
            self.windows.decide(committed, self.checkpointer, self.peers.senders)
            if is_other_window(self.checkpointer.history.newest, before):
                self._record_plan()
            self._settled = self._policy(window_start)
            self.disk.retry_folder()
        self.windows.give_room()
        self._spread_copies()
        self.policy_s = time.perf_counter() - began_s

    def _spread_copies(self) -> None:
        """Set the senders' rate to the bytes per second of new snapshots, once the time of an iteration is known."""
        schedule, iteration_s = self.checkpointer.history.newest, self.meter.quiet_s
        if iteration_s is None:
            return
        slots, _ = self.checkpointer.memory.slots_at_peer(schedule)
        mean = sum(slots) / (schedule.size * iteration_s)
        # Without iterations between windows, the largest snapshot must be sent before the next one comes.
        needed = mean if schedule.size > schedule.snapshots else max(slots) / iteration_s
        self.peers.spread(needed, schedule.snapshots)

    def _record_plan(self) -> None:
        """Record the expected cost of checkpoints from now on, for comparison with the measured cost."""
        schedule, memory = self.checkpointer.history.newest, self.checkpointer.memory
        slots, _ = memory.slots_at_peer(schedule)
        copied, sent = sum(memory.slots_here(schedule)) / schedule.size, sum(slots) / schedule.size
        limit = self.allowed.nbytes
        self.reports.event(
            Planned(
                iteration=max(schedule.start, self.began_at), window=schedule.size, strategy=self._config.strategy.name,
                copied_bytes=copied, replicated_bytes=sent * len(self.topology.peers[self.topology.rank]),
                memory_bytes=self.windows.planned_bytes, memory_limit_bytes=limit if math.isfinite(limit) else None,
                expected_rollback=schedule.expected_rollback(0), most_replayed=schedule.most_replayed(0),
                snapshots=schedule.snapshots,
            )
        )  # fmt: skip

    def capture(self, committed: int, record: Mapping[str, Any], *, is_first: bool) -> None:
        """Capture the snapshot ``SS_committed``.

        Args:
            committed: iteration whose state is live.
            record: boundary record and iteration record.
            is_first: True in the first iteration of the job. All snapshots of a window are then captured from the
                present state, so that the job is recoverable from its start on.
        """
        history = self.checkpointer.history
        schedule = history.at(committed)
        before = max(history.oldest.start, schedule.window_start(committed) - schedule.reach)
        first = before if is_first else committed
        for iteration in range(first, committed + 1):
            self.checkpointer.capture(
                iteration, record, state=committed, whole=self._digests_whole(iteration),
                is_updated=iteration == committed and bool(record["iteration"]), may_wait=is_first,
            )  # fmt: skip

    def _strategy(self) -> Strategy:
        """Return the strategy of the stage, before it has learned anything."""
        strategy, table = self._config.strategy, self.topology.table
        capacities = self._binding.expert_capacities(table) if strategy.needs_capacity else None
        return strategy.of(table, self.topology.most_experts, capacities)

    def learned(self, strategy: Strategy | None = None) -> dict[str, Any]:
        """Return what a strategy has learned (token counts, ...), in the form in which a snapshot record stores it.

        Args:
            strategy: strategy that has learned; None for the current strategy.

        Returns:
            Strategy name and learned state. Empty for a strategy that loses no updates in a recovery, because then no
            recovery reads them.
        """
        strategy = strategy or self.windows.strategy
        return {"learned": strategy.learned(), "strategy": strategy.name} if strategy.loses_updates else {}

    def discard_after(self, iteration: int) -> None:
        """Discard decisions and snapshots after ``iteration``. Called when a recovery has lost the later updates."""
        now = generation()
        history = now.roster.generation if now is not None else 0
        schedules = self.windows.strategy.schedules_after_rollback(self.checkpointer.history.all, iteration, history)
        self.checkpointer.history = ScheduleHistory(*schedules)
        self.checkpointer.forget_after(iteration)
        self.disk.forget_after(iteration)
        self._settled = self._policy(iteration)
        self.windows.give_room()

    @property
    def has_persisted(self) -> bool:
        """True if the ranks have agreed that a window is persisted on every rank."""
        return self.checkpointer.progress.persisted != NONE

    def recapture(self, iteration: int, record: Mapping[str, Any], *, has_gradients: bool) -> None:
        """Capture ``SS_iteration`` anew, while a recovery executes iterations again.

        Called only if the recovery has lost updates. Iterations then have other results than in their first execution,
        so their first snapshots are useless.

        Args:
            iteration: iteration whose state is live, on every rank of the job.
            record: record of the iteration; empty for an iteration that the user told the job to skip.
            has_gradients: True if the gradients of the iteration's update are still in memory, so that the rank can
                log them.
        """
        self.windows.count(iteration)
        self.decide(iteration)
        if not self.checkpointer.takes(iteration):
            return
        if record and has_gradients:
            self.checkpointer.log_gradients(iteration, is_replayed=True)
        boundary = self._binding.boundary_copy()
        self.checkpointer.take(
            iteration, {"boundary": boundary, "iteration": record, **self.learned()}, is_updated=bool(record)
        )
        self.checkpointer.wait()

    def oldest_needed(self, committed: int) -> int:
        """Return the oldest iteration whose logs and records a replay may need.

        This is the first iteration that a replay from the newest persisted recoverable run repeats. But it is never
        older than the first iteration of the longest replay that the schedules plan for. Otherwise, logs would grow
        without limit while no window is persisted.
        """
        reach, needed = max(map(self.windows.iterations_logged, self.checkpointer.history.all)), NONE
        if (run := self.checkpointer.needed)[0] != NONE:
            needed = self.checkpointer.history.at(run[0]).replayed_after(run)
        return max(needed, committed + 2 - reach)

    def _digests_whole(self, iteration: int) -> Collection[str]:
        """Return the operators whose whole state has a digest in ``SS_iteration``."""
        match self._config.verify:
            case Verify.NOTHING:
                return ()
            case Verify.WINDOW:
                schedule = self.checkpointer.history.at(iteration)
                return schedule.digested_once_a_window(iteration)
            case Verify.ITERATION:
                return self.topology.table.names

    # After a failure

    def policy(self) -> Policy:
        """Return the newest decisions that this rank has completed. After a failure, ranks send them to each other."""
        return replace(
            self._settled, announced=self.watch.announced, disk_job=self.disk.job_name, needed=self.checkpointer.needed
        )

    def _keeps(self) -> Copies:
        """Return the snapshots that this rank keeps for other ranks."""
        # An owner may have several stores, the newest first. In reversed order, the newest overrides the others.
        stores = reversed(self.checkpointer.replicator.stores)
        return {store.source: dict(sorted(store.schedules().items())) for store in stores}

    def rewire(self, policy: Policy) -> None:
        """Continue in a new generation. Survivors call it when replacements create their :class:`Saving`.

        Args:
            policy: policy on which the ranks of the stage agreed. A failure may have interrupted some of them within a
                decision, so their own policies may differ.
        """
        self._go_by(policy)
        checkpointer = self.checkpointer
        self.topology = self.windows.topology = self.disk.topology = connect(
            self._config, self._binding, self.topology, is_running=True
        )
        self._warn_of_copies()
        checkpointer.make_room_for_kept()
        has = ask_peers(self.topology, self._keeps())
        before = checkpointer.replicator.stores
        senders, receivers = self.peers.connect(self.topology, self.allowance, before)
        current = {receiver.store for receiver in receivers}
        # An owner may have other peers now. Its copies on this rank stay useful until the new peers have copies.
        others = [store for store in before if not store.shares_memory_with(current)]
        checkpointer.rewire(senders, receivers, self.topology.channels.agreement, has, former=others)
        self.watch.forget_peers()

    def interrupted(self) -> None:
        """Go back to the last completed decision, because a failure may have interrupted a later decision."""
        self.meter.interrupted()
        self._go_by(self._settled)

    def _go_by(self, policy: Policy) -> None:
        """Make ``policy`` the decisions of this rank."""
        self._settled = policy
        self.windows.adopt(policy)
        self.checkpointer.history = ScheduleHistory(*policy.schedules)

    def take_start(self) -> None:
        """Capture snapshots of the state that the job began from. Called on a replacement that was just built.

        A replacement is built with that state. If it fails before its first snapshot of training reaches a peer, its
        rank is recovered from these snapshots.
        """
        schedule = self.checkpointer.history.oldest
        if schedule.start > self.began_at or self.began_at > 0:
            return  # Windows were persisted since the job began, or the job began from a loaded state.
        # Peers do not accept snapshots that are too old for any restore point.
        first = max(schedule.start, self.checkpointer.oldest_needed)
        record = {"boundary": self._binding.boundary_copy(), "iteration": {}, **self.learned(self._strategy())}
        for iteration in filter(self.checkpointer.takes, range(first, self.began_at + 1)):
            whole = self._digests_whole(iteration)
            self.checkpointer.take(iteration, record, state=self.began_at, whole=whole, is_updated=False)
            self.checkpointer.wait()

    @property
    def copies_missing(self) -> int:
        """Number of copies of this rank's snapshots that peers do not have yet."""
        return sum(
            peer not in snapshot.acknowledged
            for snapshot in self.checkpointer.own.snapshots().values()
            for peer in self.topology.peers[self.topology.rank]
        )


def refuse_what_is_not_defined(binding: Binding, strategy: StrategyConfig) -> None:
    """Refuse flags that need a method or gradients that the trainer does not provide. Every rank calls it at the start.

    Raises:
        ConfigError: ``--moevement-capacity-boost`` is given, but the trainer has no ``expert_room``; or
            ``--moevement-order capacity``, but it has no ``expert_capacities``; or the strategy logs gradients, but the
            trainer has no ``gather_replicas`` or no gradients in ``states``. Every rank raises it.
    """
    if strategy.capacity_boost is not None and type(binding).expert_room is Binding.expert_room:
        raise ConfigError(
            f"--moevement-capacity-boost {strategy.capacity_boost:g}: {type(binding).__name__} has no expert_room(); "
            "define the method, or leave the flag out"
        )
    if strategy.needs_capacity and type(binding).expert_capacities is Binding.expert_capacities:
        raise ConfigError(
            f"--moevement-order capacity: {type(binding).__name__} has no expert_capacities(); define the method, or "
            "give another order"
        )
    if not strategy.logs_gradients:
        return
    asked, instead = f"--moevement-recovery {strategy.recovery}", "--moevement-recovery replay"
    if not strategy.may_redo:
        asked, instead = f"--moevement-strategy {strategy.name}", "--moevement-dense-interval 2 or more"
    if type(binding).gather_replicas is Binding.gather_replicas:
        raise ConfigError(f"{asked}: {type(binding).__name__} has no gather_replicas(); define it or use {instead}")
    states = binding.states().values()
    if any(
        all_gather_objects(any(state.full for state in states) and not any(state.gradient for state in states), bool)
    ):
        raise ConfigError(
            f"{asked}: states() of {type(binding).__name__} has no gradients; set OperatorState.gradient in states(), "
            f"or use {instead}"
        )
