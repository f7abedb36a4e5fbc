"""Snapshots of one rank, window by window, through all generations of the job, and how long they are needed."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moevement_core.comms import plain
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
from moevement_core.saving.peers import Copies, Peers, peers_have
from moevement_core.saving.progress_watch import ProgressWatch
from moevement_core.saving.reports import Reports
from moevement_core.saving.stage_policy import Policy
from moevement_core.saving.windows import WindowDecisions
from moevement_core.saving.windows_on_disk import WindowsOnDisk
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.snapshot import BOUNDARY, StateTensor, aligned_bytes
from moevement_core.strategies import Strategy
from moevement_core.strategies.config import StrategyConfig
from moevement_core.topology.address import own_address
from moevement_core.topology.host_budget import allowed
from moevement_core.topology.parts import Parts
from moevement_core.topology.topology import connect
from moevement_core.trainer.binding import Binding
from moevement_core.trainer.config import SessionConfig

RECORD_SLACK_BYTES = 64 << 10
"""Room for a boundary record to grow."""


@dataclass(frozen=True)
class Joining:
    """Knowledge that a rank needs to join a running job."""

    policy: Policy
    """Decisions of a stage."""
    is_of_same_stage: bool
    """True if the decisions are those of this rank's stage."""
    kept: Sequence[Copies]
    """Snapshots that every rank keeps for others."""

    def policy_for(self, strategy: Strategy, most_operators: int) -> Policy:
        """Returns the policy of this rank's stage; orders are of another table where nobody of it is left."""
        if self.is_of_same_stage:
            return self.policy
        return self.policy.for_stage(strategy.first(0, most_operators), strategy.learned())


class Saving:
    """Saving of one rank. Collective: all ranks make one at the same point and call each method in the same order.

    Args:
        binding: the trainer.
        config: the flags.
        names: of the job.
        joining: what a replacement knows of the running job; None where the job starts.
        is_resized: whether the job goes on with another number of ranks: then with as many copies as they allow.
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
        """The iteration that the job started from."""
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
        """Meter of what saving costs training."""
        self.windows = self._window_decisions(strategy, policy)
        self.policy_s = 0.0
        """Seconds that the last decision took."""
        self.peers = Peers(current_device(), lambda: self.checkpointer.own, self.reports.report, pace, self._pause)
        self._states = binding.states()
        self.checkpointer = self._start_checkpointer(
            policy, joining.kept if joining is not None else (), is_resized=is_resized
        )
        is_auto, has_parity = config.budget.keep_own is KeepOwn.AUTO, config.copies.protection.parity is not None
        self.checkpointer.may_give_up_own = is_auto and config.disk.persist_dir is None and not has_parity
        disk_job, announced = (policy.disk_job, policy.announced) if policy is not None else ("", NONE)
        self.disk = WindowsOnDisk(binding, names, config, self.topology, self.checkpointer, self.reports, disk_job)
        self.watch = ProgressWatch(
            self.checkpointer, self.reports, config.timeouts.peer_s, announced, self.meter, config.strategy.kept_cap
        )
        self._settled = policy or self._policy(binding.iteration)
        """Decisions as of the last window whose decisions this rank completed; other ranks may still be deciding."""
        if joining is None:
            self.peers.refuse_without_copies(self.topology, config.timeouts.peer_s, config.copies.replicas)
            self.disk.start()
            self._record_plan()

    # Once

    @property
    def parts(self) -> Parts:
        """Parts of this rank, in this generation, that a recovery uses."""
        return Parts(self._binding, self.topology, self._states, self.checkpointer)

    @property
    def may_redo(self) -> bool:
        """True if a failed rank may repeat its updates by itself."""
        return self._config.strategy.may_redo

    def _window_decisions(self, strategy: Strategy, policy: Policy | None) -> WindowDecisions:
        config = self._config
        counts = self._binding.counts(self.topology.table, strategy.counts) if strategy.counts is not None else None
        share = config.strategy.capacity_boost
        room = None if share is None else self._binding.expert_room(self.topology.table, share)
        windows = WindowDecisions(
            strategy, self.meter, counts, room, self.topology, config.budget, self.allowed, self.reports.report,
            0 if strategy.rolls_back_all else self._binding.sent_bytes,
            asked_window=config.strategy.window, to_disk=config.disk.persist_dir is not None, began_at=self.began_at,
        )  # fmt: skip
        if policy is not None:
            windows.join(policy)
        return windows

    def _policy(self, window_start: int) -> Policy:
        windows = self.windows
        return Policy(
            window_start, self.checkpointer.history.all, windows.strategy.learned(), windows.strategy.settled,
            self.watch.announced, self.began_at, self.disk.job_name, self.checkpointer.needed,
            self.checkpointer.memory.keeps_own,
        )  # fmt: skip

    def _start_checkpointer(self, policy: Policy | None, kept: Sequence[Copies], *, is_resized: bool) -> Checkpointer:
        memory = SnapshotMemory(
            self._states, self._measure_record(), to_disk=self._config.disk.persist_dir is not None,
            is_summed=self._config.copies.protection.parity is not None,
        )  # fmt: skip
        if policy is not None:
            history, memory.keeps_own = ScheduleHistory(*policy.schedules), policy.keeps_own
        else:
            history = self.windows.first(self._binding.iteration, memory, is_running=is_resized)
        self._set_aside_for_log(history.all)
        senders, receivers = self.peers.connect(self.topology, self.allowance, ())
        return Checkpointer(
            self.topology.rank,
            self._states,
            self.windows.strategy,
            history,
            current_device(),
            senders,
            receivers,
            self.topology.channels.agreement,
            memory,
            self.allowance,
            self.reports.report,
            has=peers_have(self.topology, kept),
            needed=policy.needed if policy is not None else (NONE, NONE),
            pause=self._pause,
        )

    def _set_aside_for_log(self, schedules: Sequence[Schedule]) -> None:
        self.allowance.keep(LOG, max(map(self.windows.log_bytes, schedules)))

    def log_cap_bytes(self) -> float:
        """Host memory for the boundary log: what is left beside snapshots; at least what was set aside for it."""
        return min(self._config.budget.log_memory_bytes, self.allowance.left_for(LOG))

    def share_memory_with(self, log: BoundaryLog) -> None:
        """Share host memory with the boundary log: ``log`` gives up some of its own where memory runs out."""

        def give_up(nbytes: int) -> None:
            less = max(0.0, self.allowance.of(LOG) - nbytes)
            self.allowance.keep(LOG, less)
            log.give_up(less)

        self.checkpointer.give_up_log = give_up

    def _measure_record(self) -> int:
        """Bytes to set aside for boundary records."""
        _, tensors = plain.flatten({"boundary": self._binding.boundary(), **self.learned()})
        needed = aligned_bytes(StateTensor(BOUNDARY, Saved.FULL, "", tensor) for tensor in tensors)
        return needed + RECORD_SLACK_BYTES

    def _warn_of_copies(self) -> None:
        if self.topology.rank == 0 and self.topology.warning is not None:
            self.reports.report(self.topology.warning)

    # Once an iteration

    def decide(self, committed: int) -> None:
        """Decide order and window at the beginning of a window."""
        began_s = time.perf_counter()
        # Iterations may be left out (--iterations-to-skip), the first of a window among them.
        window_start = self.checkpointer.history.at(committed).decided_at(committed)
        if window_start > self._settled.window_start:
            before = self.checkpointer.history.newest
            self.windows.decide(committed, self.checkpointer, self.peers.senders)
            if is_other_window(self.checkpointer.history.newest, before):
                self._record_plan()
            self._settled = self._policy(window_start)
            self.disk.try_again()
        self.windows.give_room()
        self._spread_copies()
        self.policy_s = time.perf_counter() - began_s

    def _spread_copies(self) -> None:
        """Let copies leave at a rate that follows from what is saved, once it is known how long an iteration takes."""
        schedule, iteration_s = self.checkpointer.history.newest, self.meter.quiet_s
        if iteration_s is None:
            return
        slots, _ = self.checkpointer.memory.slots_at_peer(schedule)
        mean = sum(slots) / (schedule.size * iteration_s)
        # Without a rest the next snapshot comes when the heaviest one should have been sent.
        needed = mean if schedule.size > schedule.snapshots else max(slots) / iteration_s
        self.peers.spread(needed, schedule.snapshots)

    def _record_plan(self) -> None:
        """Record the expected cost of checkpoints from now on, for comparison with the measured one."""
        schedule, memory = self.checkpointer.history.newest, self.checkpointer.memory
        slots, _ = memory.slots_at_peer(schedule)
        copied = sum(slots) / schedule.size
        limit = self.allowed.nbytes
        self.reports.event(
            Planned(
                max(schedule.start, self.began_at), schedule.size, self._config.strategy.name, copied,
                copied * len(self.topology.peers[self.topology.rank]), self.windows.planned_bytes,
                limit if math.isfinite(limit) else None, schedule.expected_rollback(0), schedule.most_replayed(0),
                schedule.snapshots,
            )
        )  # fmt: skip

    def capture(self, committed: int, record: Mapping[str, Any], *, is_first: bool) -> None:
        """Capture the snapshot ``SS_committed``.

        Args:
            committed: the iteration whose state is live.
            record: boundary and iteration record.
            is_first: whether it is the first iteration of the job: then a whole window, so that a run is recoverable
                from its start on.
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
        return self._config.strategy.of(self.topology.table, self.topology.most_experts)

    def learned(self, strategy: Strategy | None = None) -> dict[str, Any]:
        """Return the learned state that travels with a snapshot, where a recovery needs what the strategy knew then.

        Args:
            strategy: one that knows what is right then; None: that in force.
        """
        strategy = strategy or self.windows.strategy
        return {"learned": strategy.learned(), "strategy": strategy.name} if strategy.loses_updates else {}

    def went_back_to(self, iteration: int) -> None:
        """Decide and save again from ``iteration`` on, to which a recovery rolled back that may have lost updates."""
        now = generation()
        history = now.roster.generation if now is not None else 0
        schedules = self.windows.strategy.going_on(self.checkpointer.history.all, iteration, history)
        self.checkpointer.history = ScheduleHistory(*schedules)
        self.checkpointer.forget_after(iteration)
        self._settled = self._policy(iteration)
        self.windows.give_room()

    @property
    def has_persisted(self) -> bool:
        """True if there is a window that is persisted on every rank, as all have agreed."""
        return self.checkpointer.progress.persisted != NONE

    def take_again(self, iteration: int, record: Mapping[str, Any], *, has_gradients: bool) -> None:
        """``SS_iteration`` while a recovery runs iterations again whose outcome may be another one than it was.

        Args:
            iteration: whose state is live; every rank of the job is there.
            record: what came of it; empty if it was left out.
            has_gradients: whether those of its update are still live; a snapshot that needs them is not taken else.
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
        """The oldest iteration of which logs and records are kept: where the persisted run begins, or a later one.

        Where no window is persisted for long, what a plan could use in the best case is the bound.
        """
        reach, needed = max(map(self.windows.iterations_logged, self.checkpointer.history.all)), NONE
        if (run := self.checkpointer.needed)[0] != NONE:
            needed = self.checkpointer.history.at(run[0]).replayed_after(run)
        return max(needed, committed + 2 - reach)

    def _digests_whole(self, iteration: int) -> Collection[str]:
        """The operators of whose whole state ``SS_iteration`` has a digest."""
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
        """Decisions of this rank with the others of its stage; an incomplete decision is left out."""
        return replace(
            self._settled, announced=self.watch.announced, disk_job=self.disk.job_name, needed=self.checkpointer.needed
        )

    def keeps(self) -> dict[int, dict[int, str]]:
        """The snapshots that are kept here for others, by their rank: the id of the schedule by iteration."""
        # Of several of one rank the newest counts, which comes first.
        stores = reversed(self.checkpointer.replicator.stores)
        return {store.source: dict(sorted(store.schedules().items())) for store in stores}

    def rewire(self, policy: Policy, kept: Sequence[Copies]) -> None:
        """Go on in a new generation; every rank calls it, or makes its :class:`Saving`, at the same point.

        Args:
            policy: of its stage; some ranks may have been interrupted in the middle of a decision, and some after it.
            kept: what :meth:`keeps` gave, of every rank.
        """
        self._go_by(policy)
        checkpointer = self.checkpointer
        self.topology = self.windows.topology = self.disk.topology = connect(
            self._config, self._binding, self.topology, is_running=True
        )
        self._warn_of_copies()
        checkpointer.make_room_for_kept()
        before = checkpointer.replicator.stores
        senders, receivers = self.peers.connect(self.topology, self.allowance, before)
        current = {receiver.store for receiver in receivers}
        others = [store for store in before if not store.is_part_of(current)]
        # What is kept for ranks that have other peers now is of use until they have brought it there.
        has = peers_have(self.topology, kept)
        checkpointer.rewire(senders, receivers, self.topology.channels.agreement, has, former=others)
        self.watch.forget_peers()

    def interrupted(self) -> None:
        """An exception from outside came at any moment: a decision that was under way is none."""
        self.meter.interrupted()
        self._go_by(self._settled)

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
        record = {"boundary": self._binding.boundary_copy(), "iteration": {}, **self.learned(self._strategy())}
        for iteration in filter(self.checkpointer.takes, range(first, self.began_at + 1)):
            whole = self._digests_whole(iteration)
            self.checkpointer.take(iteration, record, state=self.began_at, whole=whole, is_updated=False)
            self.checkpointer.wait()

    @property
    def copies_missing(self) -> int:
        """Snapshots of this rank, each as often as a peer does not have it yet."""
        return sum(
            peer not in snapshot.acknowledged
            for snapshot in self.checkpointer.own.snapshots().values()
            for peer in self.topology.peers[self.topology.rank]
        )


def refuse_what_is_not_defined(binding: Binding, strategy: StrategyConfig) -> None:
    """Refuse what the trainer does not give; before training begins, on every rank alike.

    Raises:
        ConfigError: experts are to be given more room, and nobody does; or updates are to be made again, and there is
            nothing that they were made from, or nobody who would bring them to replicas.
    """
    if strategy.capacity_boost is not None and type(binding).expert_room is Binding.expert_room:
        raise ConfigError(
            f"--moevement-capacity-boost {strategy.capacity_boost:g}: {type(binding).__name__} has no expert_room(); "
            "define it, or leave the flag out"
        )
    if not strategy.logs_gradients:
        return
    asked, instead = f"--moevement-recovery {strategy.recovery}", "--moevement-recovery replay"
    if not strategy.may_redo:
        asked, instead = f"--moevement-strategy {strategy.name}", "--moevement-dense-interval 2 or more"
    if type(binding).complete is Binding.complete:
        raise ConfigError(f"{asked}: {type(binding).__name__} has no complete(); define it, or use {instead}")
    states = binding.states().values()
    if any(
        all_gather_objects(any(state.full for state in states) and not any(state.gradient for state in states), bool)
    ):
        raise ConfigError(
            f"{asked}: {type(binding).__name__} gives no gradients; give them in states() (OperatorState.gradient), or "
            f"use {instead}"
        )
