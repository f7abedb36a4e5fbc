"""Saving of one rank's snapshots, window by window, through all generations of the job."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.config import Verify
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import ConfigError
from moevement_core.overhead.meter import OverheadMeter
from moevement_core.policy.schedule import ScheduleHistory, decided_at, is_other_window
from moevement_core.rendezvous.roster import is_drained
from moevement_core.replication.allowance import LOG, OWN, Allowance
from moevement_core.restart.generation import generation
from moevement_core.run.events import Planned
from moevement_core.saving.peers import Copies, Peers, ask_peers
from moevement_core.saving.progress_watch import ProgressWatch
from moevement_core.saving.reports import Reports
from moevement_core.saving.stage_policy import Policy
from moevement_core.saving.windows import WindowDecisions
from moevement_core.saving.windows_on_disk import WindowsOnDisk
from moevement_core.strategies import Strategy
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.strategy import StageOperators
from moevement_core.topology.host_budget import Allowed
from moevement_core.topology.parts import RankParts
from moevement_core.topology.topology import Topology, connect
from moevement_core.trainer.binding import Binding, SupportsRedo
from moevement_core.trainer.capabilities import (
    SupportsCapacities,
    SupportsExtraCapacity,
    SupportsGather,
    refuse_half_capabilities,
)
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface


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

    Collective: all ranks create an instance at the same point, and call each method in the same order. The constructor
    does not communicate; ``session/build.py`` makes the parts.

    Args:
        binding: binding of the trainer.
        config: flags of the job.
        topology: topology of this generation.
        reports: reports to the people who run the job.
        allowed: host memory that this rank may use.
        allowance: division of that memory between snapshots, copies and the boundary log.
        meter: meter of the training time that saving costs.
        windows: decisions about windows.
        peers: threads that send and receive copies.
        states: live tensors by operator.
        checkpointer: checkpointer of this rank.
        disk: windows on disk.
        watch: watch over checkpointing.
        policy: newest decisions of the job, on a replacement; None if the job starts.
    """

    def __init__(
        self,
        *,
        binding: BindingInterface,
        config: SessionConfig,
        topology: Topology,
        reports: Reports,
        allowed: Allowed,
        allowance: Allowance,
        meter: OverheadMeter,
        windows: WindowDecisions,
        peers: Peers,
        states: Mapping[str, OperatorState],
        checkpointer: Checkpointer,
        disk: WindowsOnDisk,
        watch: ProgressWatch,
        policy: Policy | None,
    ) -> None:
        self._binding, self._config, self._states = binding, config, states
        self.topology, self.reports, self.allowed, self.allowance = topology, reports, allowed, allowance
        self.meter, self.windows, self.peers = meter, windows, peers
        self.checkpointer, self.disk, self.watch = checkpointer, disk, watch
        self.began_at = binding.iteration if policy is None else policy.began_at
        """Iteration that the job started from."""
        self.policy_s = 0.0
        """Seconds that the last call of :meth:`decide` took."""
        self._settled = policy or self._policy(binding.iteration)
        """Newest decisions that this rank has completed; other ranks may still be deciding."""

    def start(self) -> None:
        """Refuse what the job cannot save, and begin to write windows to disk. Every rank calls it when a job starts.

        Raises:
            ConfigError: a peer has no host memory for copies, or the folder for windows is unusable. Every rank raises
                it.
        """
        self.peers.refuse_without_copies(self.topology, self._config.timeouts.peer_s, self._config.copies.replicas)
        self.disk.start()
        self._record_plan()

    @property
    def parts(self) -> RankParts:
        """Objects that a recovery needs: binding, topology of this generation, operator states and checkpointer."""
        return RankParts(self._binding, self.topology, self._states, self.checkpointer)

    @property
    def may_redo(self) -> bool:
        """True if a failed rank may recover by redo: it alone repeats updates from logged gradients."""
        return self._config.strategy.may_redo

    def _policy(self, window_start: int) -> Policy:
        windows = self.windows
        return Policy(
            window_start, schedules=self.checkpointer.history.all, learned=windows.strategy.learned(),
            settled=windows.strategy.settled, announced=self.watch.announced, began_at=self.began_at,
            disk_job=self.disk.job_name, needed=self.checkpointer.lifetime.persisted,
            keeps_own_copies=self.checkpointer.memory.keeps_own_copies, failures=windows.failures, worth=windows.worth,
        )  # fmt: skip

    # Once an iteration

    def decide(self, committed: int) -> None:
        """Decide the order of operators and the window, if a window begins. Called before every iteration."""
        began_s = time.perf_counter()
        # The job may leave out iterations (--iterations-to-skip), even the first iteration of a window.
        window_start = decided_at(self.checkpointer.history.at(committed), committed)
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
                expected_rollback=schedule.rollback(0).mean, most_replayed=schedule.rollback(0).most,
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
        before = max(history.oldest.start, committed - schedule.slot(committed) - schedule.cadence.reach)
        first = before if is_first else committed
        for iteration in range(first, committed + 1):
            self.checkpointer.capture(
                iteration, record, state=committed, whole=self._digests_whole(iteration),
                is_updated=iteration == committed and bool(record["iteration"]), may_wait=is_first,
            )  # fmt: skip

    def discard_after(self, iteration: int) -> None:
        """Discard decisions and snapshots after ``iteration``. Called when a recovery has lost the later updates."""
        now = generation()
        history = now.roster.generation if now is not None else 0
        strategy, schedules = self.windows.strategy, self.checkpointer.history.all
        if isinstance(strategy, LosesUpdates):
            schedules = tuple(strategy.schedules_after_rollback(schedules, iteration, history))
        self.checkpointer.history = ScheduleHistory(*schedules)
        self.checkpointer.forget_after(iteration)
        self.disk.forget_after(iteration)
        self._settled = self._policy(iteration)
        self.windows.give_room()

    def has_room_for_state(self) -> bool:
        """Return True if the allowance for host memory suffices for a copy of this rank's whole state."""
        nbytes = sum(tensor.nbytes for state in self.parts.states.values() for tensor in state.full)
        return self.allowance.total_bytes - sum(map(self.allowance.of, (OWN, LOG))) >= nbytes

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
        if not self.checkpointer.history.takes(iteration):
            return
        if record and has_gradients:
            self.checkpointer.log_gradients(iteration, is_replayed=True)
        boundary, learned = self._binding.boundary_copy(), learned_record(self.windows.strategy)
        self.checkpointer.take(
            iteration, {"boundary": boundary, "iteration": record, **learned}, is_updated=bool(record)
        )
        self.checkpointer.wait()

    def oldest_needed(self, committed: int) -> int:
        """Return the oldest iteration whose logs and records a replay may need.

        This is the first iteration that a replay from the newest persisted recoverable run repeats. But it is never
        older than the first iteration of the longest replay that the schedules plan for. Otherwise, logs would grow
        without limit while no window is persisted.
        """
        reach = max(map(self.windows.iterations_logged, self.checkpointer.history.all))
        planned = committed + 2 - reach
        if (run := self.checkpointer.lifetime.persisted) is None:
            return planned
        first, last = run
        return max(planned, last if self.checkpointer.history.at(first).restores_last else first)

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
        needed = self.checkpointer.lifetime.persisted
        return replace(self._settled, announced=self.watch.announced, disk_job=self.disk.job_name, needed=needed)

    def _keeps(self) -> Copies:
        """Return the snapshots that this rank keeps for other ranks."""
        # An owner may have several stores, the newest first. In reversed order, the newest overrides the others.
        stores = reversed(self.checkpointer.replicator.stores)
        return {store.source: dict(sorted(store.schedules().items())) for store in stores}

    def forget_handed_over(self) -> None:
        """Free the states that ranks which left have handed to this rank; called when training resumes."""
        for store in self.checkpointer.replicator.stores:
            if store.handed_over is not None:
                store.handed_over = None
                self.allowance.keep(store.key_of_handover, 0)

    def rewire(self, policy: Policy) -> None:
        """Continue in a new generation. Survivors call it when replacements create their :class:`Saving`.

        Args:
            policy: policy on which the ranks of the stage agreed. A failure may have interrupted some of them within a
                decision, so their own policies may differ.
        """
        now = generation()
        is_planned = now is not None and bool(now.roster.deaths) and all(map(is_drained, now.roster.deaths))
        self._go_by(policy if is_planned else replace(policy, failures=policy.failures + 1))
        checkpointer = self.checkpointer
        self.topology = self.windows.topology = self.disk.topology = connect(
            self._config, self._binding, self.topology, is_running=True
        )
        warn_of_copies(self.topology, self.reports)
        checkpointer.room.make_for_kept(checkpointer.kept_schedules)
        has = ask_peers(self.topology, self._keeps())
        before = checkpointer.replicator.stores
        senders, receivers = self.peers.connect(self.topology, self.allowance, before)
        current = {receiver.store.memory for receiver in receivers}
        # An owner may have other peers now. Its copies on this rank stay useful until the new peers have copies.
        others = [store for store in before if store.memory not in current]
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
        needed = self.checkpointer.oldest_needed
        first = schedule.start if needed is None else max(schedule.start, needed)
        record = {
            "boundary": self._binding.boundary_copy(),
            "iteration": {},
            **learned_record(strategy_of(self._config.strategy, self._binding, self.topology)),
        }
        for iteration in filter(self.checkpointer.history.takes, range(first, self.began_at + 1)):
            whole = self._digests_whole(iteration)
            self.checkpointer.take(iteration, record, state=self.began_at, whole=whole, is_updated=False)
            self.checkpointer.wait()

    @property
    def copies_missing(self) -> int:
        """Number of copies of this rank's snapshots that peers do not have yet."""
        return sum(
            peer not in snapshot.acknowledged
            for snapshot in self.checkpointer.own.snapshots.values()
            for peer in self.topology.peers[self.topology.rank]
        )


def strategy_of(config: StrategyConfig, binding: BindingInterface, topology: Topology) -> Strategy:
    """Return the strategy of this rank's stage, before it has learned anything.

    Args:
        config: flags of the strategy.
        binding: binding of the trainer.
        topology: topology of a generation.
    """
    capacities = None
    if config.needs_capacity and isinstance(binding, SupportsCapacities):
        capacities = binding.expert_capacities(topology.table)
    return config.of(StageOperators(topology.table, topology.most_experts, capacities))


def learned_record(strategy: Strategy) -> dict[str, Any]:
    """Return what a strategy has learned (token counts, ...), in the form in which a snapshot record stores it.

    Args:
        strategy: strategy that has learned.

    Returns:
        Strategy name and learned state. Empty for a strategy that loses no updates in a recovery, because then no
        recovery reads them.
    """
    return {"learned": strategy.learned(), "strategy": strategy.name} if isinstance(strategy, LosesUpdates) else {}


def warn_of_copies(topology: Topology, reports: Reports) -> None:
    """Report that copies or parity survive fewer failures than the flags ask for. Only rank 0 reports it."""
    if topology.rank == 0 and topology.warning is not None:
        reports.report(topology.warning)


def refuse_what_is_not_defined(binding: BindingInterface, strategy: StrategyConfig) -> None:
    """Refuse flags that need a method or gradients that the trainer does not provide. Every rank calls it at the start.

    Raises:
        ConfigError: ``--moevement-capacity-boost`` is given, but the trainer has no ``expert_room``; or
            ``--moevement-order capacity``, but it has no ``expert_capacities``; or the strategy logs gradients, but the
            trainer has no ``gather_replicas``, no ``redo`` or no gradients in ``states``. Or the trainer defines a part
            of a capability. Every rank raises it.
    """
    refuse_half_capabilities(binding)
    if strategy.capacity_boost is not None and not isinstance(binding, SupportsExtraCapacity):
        raise ConfigError(
            f"--moevement-capacity-boost {strategy.capacity_boost:g}: {type(binding).__name__} has no expert_room(); "
            "define the method, or leave the flag out"
        )
    if strategy.needs_capacity and not isinstance(binding, SupportsCapacities):
        raise ConfigError(
            f"--moevement-order capacity: {type(binding).__name__} has no expert_capacities(); define the method, or "
            "give another order"
        )
    if not strategy.logs_gradients:
        return
    asked, instead = f"--moevement-recovery {strategy.recovery}", "--moevement-recovery replay"
    if not strategy.may_redo:
        asked, instead = f"--moevement-strategy {strategy.name}", "--moevement-dense-interval 2 or more"
    if not isinstance(binding, SupportsGather):
        raise ConfigError(f"{asked}: {type(binding).__name__} has no gather_replicas(); define it or use {instead}")
    if isinstance(binding, Binding) and not isinstance(binding, SupportsRedo):
        raise ConfigError(f"{asked}: {type(binding).__name__} has no redo(); define it or use {instead}")
    states = binding.states().values()
    if any(
        all_gather_objects(any(state.full for state in states) and not any(state.gradient for state in states), bool)
    ):
        raise ConfigError(
            f"{asked}: states() of {type(binding).__name__} has no gradients; set OperatorState.gradient in states(), "
            f"or use {instead}"
        )
