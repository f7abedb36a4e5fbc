"""Simulated MoEvement: each iteration saves a part of the state, and only stages that lost state replay (section 3)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moevement_core.operators import OperatorKind
from moevement_core.planning.checkpoint_plan import CheckpointPlan, StagePlan
from moevement_core.planning.planned_memory import PlannedMemory
from moevement_core.policy.popularity import order_operators
from moevement_core.policy.schedule import ScheduleHistory
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.costs.costs import Costs
from moevement_core.simulator.costs.strategy_cost import StrategyCost


@dataclass(frozen=True)
class Techniques:
    """Techniques of MoEvement's section 3 that a strategy uses in addition to sparse snapshots."""

    skips_frozen: bool = True
    """True if frozen operators compute no weight gradients in a replay (section 3.3)."""
    reorders: bool = True
    """True if a window saves the most popular experts last, so that they stay frozen longest (section 3.5)."""
    is_local: bool = True
    """True if only the stages that lost state replay, from boundary logs (section 3.4)."""


class MoEvementCost(StrategyCost):
    """Strategy that saves one slot in each iteration, with the windows of the job's plan, and recovers by replay.

    Args:
        costs: costs of the job.
        techniques: techniques in use; None for all.
        kind: kind of the windows; None for the kind in the plan.
        name: name of the strategy.
    """

    def __init__(
        self,
        costs: Costs,
        techniques: Techniques | None = None,
        kind: WindowKind | None = None,
        name: str = "moevement",
    ) -> None:
        if kind is not None and kind is not costs.plan.inputs.kind:
            costs = replace(costs, plan=CheckpointPlan(replace(costs.plan.inputs, kind=kind)))
        super().__init__(costs)
        self.techniques, self.name = techniques or Techniques(), name

    @cached_property
    def overhead_s(self) -> float:
        """Mean seconds that saving adds to an iteration: stalls, waits for late sends, and slower training."""
        plan = self.costs.plan
        return plan.stall_s + plan.behind_s / plan.period + self.costs.slowed_s(self.copied_bytes, self.sent_bytes)

    interval = 1

    @cached_property
    def copied_bytes(self) -> float:
        """Mean bytes that the heaviest rank copies to its host in an iteration.

        The rank copies snapshots. It also copies the boundary log, unless all stages roll back after a failure: then
        replay needs no log.
        """
        logged = self.techniques.is_local
        return max(self._saved_bytes(stage) + stage.log_bytes * logged for stage in self.costs.plan.stages)

    @cached_property
    def sent_bytes(self) -> float:
        """Mean bytes that the heaviest rank sends to each peer in an iteration: snapshots without the boundary log."""
        return max(self._saved_bytes(stage) for stage in self.costs.plan.stages)

    def _saved_bytes(self, stage: StagePlan) -> float:
        """Return the bytes of a window's snapshots on a rank, divided by the iterations from window to window."""
        return float(stage.window_bytes) / self.costs.plan.period

    @cached_property
    def host_bytes(self) -> float:
        """Bytes of host memory of a rank by the plan; without the boundary log if all stages roll back."""
        snapshots, replicas, logs = PlannedMemory(self.costs.plan).of_rank
        return snapshots + replicas + logs * self.techniques.is_local

    @cached_property
    def fetch_s(self) -> float:
        """Seconds in which a rank fetches all slots of its newest window from a peer."""
        return self.costs.plan.inputs.cluster.fetch_s(self.costs.plan.window_bytes)

    @property
    def _local_fetch_s(self) -> float:
        """Seconds in which a rank copies all slots of its newest window from its own host to the device."""
        return self.costs.copy_s(self.costs.plan.window_bytes)

    @property
    def _converted(self) -> int:
        """Number of iterations at the beginning of a replay until all operators are active: W - 1.

        They lead from the first snapshot of a window to the last.
        """
        return self.costs.plan.size - 1

    @cached_property
    def arrival(self) -> float:
        """Iterations until all peers have the heaviest slot: the time to copy it to the host, and then to send it."""
        return (
            max(
                stage.budget.copy_s(stage.window.peak_bytes) + stage.budget.send_s(stage.window.peak_bytes)
                for stage in self.costs.plan.stages
            )
            / self.costs.iteration_s
        )

    def rollback(self, committed: int, into: float) -> int:
        """Return the number of iterations since the first snapshot of the newest recoverable run that peers have."""
        newest = self._newest(committed, into)
        return committed - newest + self._reach[newest % self.costs.plan.period]

    @cached_property
    def _reach(self) -> list[int]:
        """Iterations from the first snapshot of the newest recoverable run to t, if all snapshots up to t are at peers.

        Entry i of the list holds for each iteration t with ``t % period == i``. The code of a live rank finds the
        recoverable run.
        """
        stage = self.costs.plan.binding_stage
        period, contents, reach = self.costs.plan.period, ScheduleHistory(stage.schedule).contents, []
        for newest in range(2 * period, 3 * period):
            taken = ((iteration, contents(iteration)) for iteration in range(newest + 1))
            held = {iteration: saved for iteration, saved in taken if saved is not None}
            reach.append(newest - next(stage.strategy.restore_points(held)).first)
        return reach

    @property
    def expected_rollback(self) -> float:
        """Mean rollback in iterations, computed by the schedule of a live rank.

        The schedule counts its lag from the end of the iteration in which a slot is copied, so the lag is
        ``arrival - 1``.
        """
        return self.costs.plan.binding_stage.schedule.rollback(self.arrival - 1).mean

    @cached_property
    def frozen_share(self) -> float:
        """Share of a rank's work that frozen operators do in a replay, until all operators are active.

        It is a mean over the iterations with frozen operators and over all stages.
        """
        return float(np.mean([self._frozen_share(stage) for stage in self.costs.plan.stages]))

    def _frozen_share(self, stage: StagePlan) -> float:
        """Return the share of a stage's work that frozen operators do, as a mean over the slots of a window.

        The work of an expert is proportional to the tokens that reach it. All other operators process all tokens. The
        embedding does no work, because it has no matrix product.
        """
        factor = {OperatorKind.EXPERT: float(self.costs.plan.inputs.job.experts_per_token), OperatorKind.EMBEDDING: 0.0}
        each = np.array([operator.parameters * factor.get(operator.kind, 1.0) for operator in stage.operators])
        ends = np.array(stage.window.ends)
        active, total = np.zeros(len(ends)), 0.0
        for shares in self.costs.shares(stage.operators):
            order = stage.order
            if self.techniques.reorders:
                order = order_operators(stage.table, np.where(stage.table.is_expert, shares, 0.0))
            work = (each * shares)[order]
            active += np.concatenate(([0.0], np.cumsum(work)))[ends]
            total += float(work.sum())
        return float(np.mean(1 - active / total))

    def replay_iteration_s(self, nodes: Collection[int]) -> float:
        """Return the seconds of a replayed iteration, on the slowest group of stages that replay together.

        A group of one stage has no pipeline bubble.
        """
        if not self.techniques.is_local:
            return self.costs.iteration_s
        return self._local_s(frozenset(self.costs.placement.segments(nodes)))

    def _local_s(self, lost: frozenset[frozenset[int]]) -> float:
        """Return the seconds of a replayed iteration. All groups replay at the same time, so the slowest one counts.

        Args:
            lost: groups of stages; the stages of a group replay together.
        """
        if lost not in self._known:
            self._known[lost] = max(self.costs.time.segment_s(segment) for segment in lost)
        return self._known[lost]

    @cached_property
    def _known(self) -> dict[frozenset[frozenset[int]], float]:
        return {}

    def _replay_s(self, nodes: Collection[int], iterations: float) -> tuple[float, float]:
        """Return the seconds of a replay: with some operators frozen, and once all operators are active.

        Frozen operators compute no weight gradients, unless :attr:`Techniques.skips_frozen` is False.
        """
        converted = min(iterations, self._converted)
        active_s = frozen_s = self.replay_iteration_s(nodes)
        if self.techniques.skips_frozen:
            frozen_s *= 1 - self.costs.weight_gradient_share * self.frozen_share
        return converted * frozen_s, (iterations - converted) * active_s


class RedoCost(MoEvementCost):
    """Strategy in which a lost rank repeats the updates of its newest window from logged gradients.

    The repeated updates restore the state at the end of the newest window that all peers have. Then the stages of lost
    ranks replay the iterations after this window.

    Args:
        costs: costs of the job.
        name: name of the strategy.
    """

    def __init__(self, costs: Costs, name: str = "redo") -> None:
        super().__init__(replace(costs, plan=costs.plan.redo()), name=name)

    @property
    def _converted(self) -> int:
        """Number of iterations at the beginning of a replay until all operators are active.

        It is 0, because repeated updates restore the full state of all operators before a replay begins.
        """
        return 0

    @cached_property
    def fetch_s(self) -> float:
        """Seconds in which a rank fetches all slots of its newest window from a peer, and repeats the window's updates.

        Each update reads and writes the full state of the rank.
        """
        return super().fetch_s + self.costs.plan.updates_s

    @property
    def _local_fetch_s(self) -> float:
        """Seconds in which a rank copies all slots of its newest window from its own host, and repeats the updates."""
        return super()._local_fetch_s + self.costs.plan.updates_s

    @cached_property
    def _reach(self) -> list[int]:
        """Iterations from the newest state that updates can restore to t, if all snapshots up to t are at peers.

        Entry i of the list holds for each iteration t with ``t % period == i``. If windows follow each other without a
        pause, updates can restore ``state@t``, and all entries are 0. With a pause between windows, updates can only
        restore the state of the last snapshot of a window.
        """
        size, period = self.costs.plan.size, self.costs.plan.period
        return [(newest - size + 1) % period if period > size else 0 for newest in range(period)]
