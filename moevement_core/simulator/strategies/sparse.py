"""MoEvement: a slice of the state in every iteration (section 3), and recovery of the stages that lost theirs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moevement_core.checkpoint_plan import CheckpointPlan, StagePlan
from moevement_core.operators import OperatorKind
from moevement_core.policy.popularity import order_operators
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.strategies.base import Costs, Strategy


@dataclass(frozen=True)
class Techniques:
    """Techniques of section 3 that are in use beside sparse snapshots."""

    skips_frozen: bool = True
    """Frozen operators compute no weight gradients in a replay (section 3.3)."""
    reorders: bool = True
    """The most popular experts are saved last, and stay frozen longest (section 3.5)."""
    is_local: bool = True
    """True if only the stages that lost state replay, from logs (section 3.4)."""


class MoEvement(Strategy):
    """Sparse checkpoints of the plan's window.

    Args:
        costs: of the job.
        techniques: in use; all if left out.
        kind: of the window; the plan's if left out.
        name: how it is called.
    """

    def __init__(
        self,
        costs: Costs,
        techniques: Techniques | None = None,
        kind: WindowKind | None = None,
        name: str = "moevement",
    ) -> None:
        if kind is not None and kind is not costs.plan.given.kind:
            costs = replace(costs, plan=CheckpointPlan(replace(costs.plan.given, kind=kind)))
        super().__init__(costs)
        self.techniques, self.name = techniques or Techniques(), name

    @cached_property
    def overhead_s(self) -> float:
        """Stalls of the plan, what replication falls behind in a window, and slowing."""
        plan = self.costs.plan
        return plan.stall_s + plan.behind_s / plan.period + self.slowed_s

    interval = 1

    @cached_property
    def copied_bytes(self) -> float:
        """Slots of the heaviest rank, a mean over its iterations, and its boundary log."""
        logged = self.techniques.is_local
        return max(self._saved_bytes(stage) + stage.log_bytes * logged for stage in self.costs.plan.stages)

    @cached_property
    def sent_bytes(self) -> float:
        """The same without the log."""
        return max(self._saved_bytes(stage) for stage in self.costs.plan.stages)

    def _saved_bytes(self, stage: StagePlan) -> float:
        """Return the bytes of snapshots of a rank, a mean over iterations with a snapshot and without."""
        return float(stage.window.slot_bytes[0].sum()) / self.costs.plan.period

    @cached_property
    def host_bytes(self) -> float:
        """Bytes of host memory that the plan states."""
        snapshots, replicas, logs = self.costs.plan.host_memory
        return snapshots + replicas + logs * self.techniques.is_local

    @cached_property
    def fetch_s(self) -> float:
        """Seconds to fetch all slots of a window of one rank."""
        return self.costs.fetch_s(max(int(stage.window.slot_bytes[0].sum()) for stage in self.costs.plan.stages))

    @property
    def converted(self) -> int:
        """Iterations from the state of the first slot to that of the last, which is dense."""
        return self.costs.plan.size - 1

    @cached_property
    def arrival(self) -> float:
        """Iterations until the heaviest slot is with all peers: copied, and sent then."""
        return (
            max(
                stage.budget.copy_s(stage.window.peak_bytes) + stage.budget.send_s(stage.window.peak_bytes)
                for stage in self.costs.plan.stages
            )
            / self.costs.iteration_s
        )

    def rollback(self, committed: int, into: float) -> int:
        """Return the iterations back to the first slot of the newest run of W that all peers have."""
        newest = self.newest(committed, into, self.arrival)
        return committed - newest + self._reach[newest % self.costs.plan.period]

    @cached_property
    def _reach(self) -> list[int]:
        """Iterations that a run reaches back from the newest snapshot, by the slot of that one, as
        a live rank finds it.
        """
        stage = self.costs.plan.binding_stage
        period, contents, reach = self.costs.plan.period, stage.schedule.contents, []
        for newest in range(2 * period, 3 * period):
            taken = ((iteration, contents(iteration)) for iteration in range(newest + 1))
            held = {iteration: saved for iteration, saved in taken if saved is not None}
            reach.append(newest - next(stage.strategy.restore_points(held)).first)
        return reach

    @property
    def expected_rollback(self) -> float:
        """Mean rollback by the policy, whose lag counts whole iterations from the one on in which
        the slot is copied.
        """
        return self.costs.plan.binding_stage.schedule.expected_rollback(self.arrival - 1)

    @cached_property
    def frozen_share(self) -> float:
        """Share of frozen operators in the work of a rank, as a mean over the iterations that make a dense state."""
        return float(np.mean([self._frozen_share(stage) for stage in self.costs.plan.stages]))

    def _frozen_share(self, stage: StagePlan) -> float:
        """An expert works for the tokens that reach it, everything else for all; an embedding has no products."""
        factor = {OperatorKind.EXPERT: float(self.costs.plan.given.job.experts_per_token), OperatorKind.EMBEDDING: 0.0}
        each = np.array([one.parameters * factor.get(one.kind, 1.0) for one in stage.operators])
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
        """Return the seconds of a replayed iteration, without the bubble where one stage replays alone."""
        if not self.techniques.is_local:
            return self.costs.iteration_s
        return self._local_s(frozenset(self.costs.segments(nodes)))

    def _local_s(self, found: frozenset[frozenset[int]]) -> float:
        """Segments replay at the same time; the slowest counts."""
        if found not in self._known:
            self._known[found] = max(self.costs.time.segment_s(segment) for segment in found)
        return self._known[found]

    @cached_property
    def _known(self) -> dict[frozenset[frozenset[int]], float]:
        return {}

    def convert_iteration_s(self, nodes: Collection[int]) -> float:
        """Return the seconds of an iteration that makes the state dense: without weight gradients
        of frozen operators.
        """
        seconds = self.replay_iteration_s(nodes)
        if self.techniques.skips_frozen:
            seconds *= 1 - self.costs.weight_gradient_share * self.frozen_share
        return seconds


class Redo(MoEvement):
    """The lost rank makes its updates again from logged gradients; what peers do not have yet its stages replay.

    Args:
        costs: of the job.
        name: how it is called.
    """

    def __init__(self, costs: Costs, name: str = "redo") -> None:
        super().__init__(replace(costs, plan=costs.plan.redo()), name=name)

    @property
    def converted(self) -> int:
        """Number of iterations that make the state dense: none."""
        return 0

    @cached_property
    def fetch_s(self) -> float:
        """Seconds to fetch all slots of a window of one rank, and for as many updates, each of which reads and writes
        its full state.
        """
        return super().fetch_s + self.costs.plan.updates_s

    @cached_property
    def _reach(self) -> list[int]:
        """Iterations that a run reaches back: to the newest snapshot; where windows have a rest, to the last snapshot
        of a window.
        """
        size, period = self.costs.plan.size, self.costs.plan.period
        return [(newest - size + 1) % period if period > size else 0 for newest in range(period)]
