"""Cost of sparse checkpointing for a job that does not run yet: window, slots, traffic, host memory, rollback.

The plan uses the code of a live run to compute operator tables, windows and memory. Three assumptions replace
measurements:

- The ranks that hold the same operator divide its optimizer state evenly. For host memory, the plan uses the exact part
  of the optimizer state that each rank holds, if this part is known.
- Experts are equally popular.
- Copies and sends reach the bandwidths of the cluster description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moevement_core.errors import WindowError
from moevement_core.operators import OperatorKind, OperatorTable
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.planning.cluster import Cluster
from moevement_core.planning.job import JobShape, OperatorShape, StageShape
from moevement_core.policy.holding import Kept, kept_of_table
from moevement_core.policy.popularity import Order, Ordering, order_operators
from moevement_core.policy.window import (
    Budget,
    PaperWindow,
    Window,
    WindowKind,
    choose_window,
    find_window_size,
    impose_window,
)
from moevement_core.precision import Regime
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.strategies import MoEvement, Redo, RedoSchedule, SparseSchedule, Strategy
from moevement_core.strategies.config import RecoveryKind
from moevement_core.strategies.redo import order_of

DEVICE_BYTES_PER_S = 1e12
"""Assumed bytes per second that an update reads and writes in device memory: half of what NVIDIA states for the A100
80GB, 2 TB/s."""
INTERRUPTED = 0.5
"""Mean share of an iteration that is done when a failure interrupts it.

The expected rollback includes this share. Numbers of replayed iterations count only committed iterations.
"""


@dataclass(frozen=True)
class PlanInput:
    """Inputs of a plan: job, cluster, number formats and settings of checkpointing."""

    job: JobShape
    cluster: Cluster
    regime: Regime
    iteration_s: float
    kind: WindowKind = WindowKind.ALIGNED
    replicas: int = 2
    """Number of copies of each snapshot; with parity, number of parity sums that peers keep of each parity group."""
    window: int | None = None
    """Window W in iterations that the user requires; None: the plan chooses W."""
    period: int | None = None
    """Period that the user requires: iterations from one window's start to the next window's start.

    None: the period is ``window`` if the user requires that, and otherwise ``overhead_cap`` decides.
    """
    contention: float = 0.0
    """Seconds that copies to peers add to training, divided by the seconds that links need for the copies alone; 0: no
    slow-down."""
    overhead_cap: float = OVERHEAD_CAP
    """Largest share of training time that copies may cost. If they would cost more, the plan pauses between windows."""
    recovery: RecoveryKind = RecoveryKind.REPLAY
    """Method of recovery: replay or redo."""
    members: int = 0
    """Number of ranks of a parity group; parity is a sum over their snapshots. 0: peers keep copies instead."""
    keeps_own_copies: bool = True
    """False if a rank frees its own snapshots once all peers have copies."""
    to_disk: bool = False
    """True if ranks write windows to disk."""

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return math.ceil(self.job.ranks / self.cluster.gpus_per_node)

    @property
    def ranks_of_node(self) -> int:
        """Largest number of ranks of a node."""
        return min(self.cluster.gpus_per_node, self.job.ranks)


@dataclass(frozen=True)
class StagePlan:
    """Plan of one pipeline stage. Its numbers are those of one rank, because all ranks of the stage are alike."""

    shape: StageShape
    table: OperatorTable
    order: Order
    ordering: Ordering
    budget: Budget
    own: Window
    """Window that this stage alone would need. The window of the job may be larger, because all stages share one W."""
    window: Window
    """Window with the W of the whole job, divided into the slots of this stage."""
    log_bytes: int
    """Bytes that a rank adds to its boundary log in an iteration."""
    rest: int
    """Number of iterations without a snapshot between two windows of the job."""
    is_redone: bool
    """True if slots hold gradients in place of compute weights, for a recovery by redo."""
    ranks: OperatorTable
    """Operator table with a row for each rank of the stage.

    The table instead has a row for each expert-parallel rank if :attr:`StageShape.ranks` is empty.
    """

    @property
    def weighed(self) -> OperatorTable:
        """Operator table whose bytes decide which operators a slot holds."""
        return self.table.with_gradients_for_compute() if self.is_redone else self.table

    @cached_property
    def strategy(self) -> Strategy:
        """Strategy that a live rank of the stage would use."""
        windows = MoEvement(self.table, self.window.kind, self.window.size)
        return Redo(self.table, windows) if self.is_redone else windows

    @cached_property
    def schedule(self) -> SparseSchedule:
        """Schedule that a live rank of the stage would use."""
        kind = RedoSchedule if self.is_redone else SparseSchedule
        return kind(self.table, self.order, self.window, rest=self.rest)

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """Bytes that a rank keeps of each snapshot of the job's window: one array for each rank of the stage."""
        ranks = self.ranks
        order = order_of(ranks) if self.is_redone else _first_order(ranks, self.ordering)
        weighed = ranks.with_gradients_for_compute() if self.is_redone else ranks
        window = impose_window(
            table=weighed, order=order, size=self.window.size, kind=self.window.kind, budget_bytes=self.budget.bytes
        )
        schedule = (RedoSchedule if self.is_redone else SparseSchedule)(ranks, order, window, rest=self.rest)
        return tuple(kept_of_table(schedule, rank) for rank in range(len(ranks.full)))

    @cached_property
    def operators(self) -> tuple[OperatorShape, ...]:
        """Shapes of the operators, in the order of :attr:`table`."""
        by_name = {operator.name: operator for operator in self.shape.operators}
        return tuple(by_name[name] for name in self.table.names)

    @property
    def window_bytes(self) -> int:
        """Bytes of all slots of a window on a rank."""
        return int(self.window.slot_bytes[0].sum())

    @property
    def full_bytes(self) -> int:
        """Bytes of the full state of all operators of a rank, which is the size of its dense checkpoint."""
        return int(self.table.full.sum())

    @property
    def compute_bytes(self) -> int:
        """Bytes of the compute weights of all operators of a rank."""
        return int(self.table.compute.sum())


def _first_order(table: OperatorTable, ordering: Ordering) -> Order:
    """Return the order of operators in the first window, when the popularity of experts is not known yet."""
    return order_operators(table, np.zeros(len(table)), ordering)


class CheckpointPlan:
    """Plan of checkpoints for a job. Numbers are those of one rank unless stated otherwise.

    Args:
        inputs: inputs of the plan.

    Raises:
        WindowError: a bandwidth or the iteration time is missing, there are too few nodes for replicas or parity, or
            the window or period that the user requires is impossible.
    """

    def __init__(self, inputs: PlanInput) -> None:
        self.inputs = inputs
        nodes = inputs.nodes
        if inputs.members and nodes < inputs.members + inputs.replicas:
            raise WindowError(
                f"parity:{inputs.members}+{inputs.replicas} on {nodes} nodes; needs at least "
                f"{inputs.members + inputs.replicas} nodes"
            )
        if 0 < nodes - 1 < inputs.replicas:
            raise WindowError(
                f"{inputs.replicas} replicas on {nodes} nodes; each replica needs another node: give at most "
                f"{nodes - 1} replicas, or more nodes"
            )
        plans = [self._stage(shape) for shape in inputs.job.stages]
        if inputs.window is not None and inputs.window > (most := max(len(stage.table) for stage in plans)):
            raise WindowError(
                f"window {inputs.window}; no stage has operators for more than {most} slots: give a window of {most} "
                "iterations or fewer"
            )
        self.size: int = inputs.window or max(stage.own.size for stage in plans)
        """Window W of the job in iterations: the W that the user requires, or else the largest W that a stage needs."""
        stages = [
            stage
            if stage.own.size == self.size
            else replace(
                stage,
                window=impose_window(
                    table=stage.weighed,
                    order=stage.order,
                    size=self.size,
                    kind=stage.own.kind,
                    budget_bytes=stage.budget.bytes,
                ),
            )
            for stage in plans
        ]
        if inputs.period is not None and not self.size <= inputs.period <= MOST_PERIOD:
            raise WindowError(
                f"period {inputs.period} with windows of {self.size} iterations; needs {self.size} to {MOST_PERIOD} "
                "iterations"
            )
        # A live job with --moevement-window has no pauses between windows either.
        chosen = self.size if inputs.window is not None else max(self.size, *map(self._shortest_period, stages))
        self.period: int = inputs.period or chosen
        """Iterations from one window's start to the next window's start: W plus :attr:`StagePlan.rest`."""
        self.stages: tuple[StagePlan, ...] = tuple(replace(stage, rest=self.period - self.size) for stage in stages)

    def _stage(self, shape: StageShape) -> StagePlan:
        inputs = self.inputs
        table = shape.table(inputs.regime)
        dense = not any(o.kind is OperatorKind.EXPERT for stage in inputs.job.stages for o in stage.operators)
        ordering = Ordering.BACK_TO_FRONT if dense else Ordering.HARD_COUNT
        order = _first_order(table, ordering)
        log_bytes = inputs.job.log_bytes_of(shape)
        budget = Budget(
            inputs.iteration_s,
            inputs.cluster.d2h_bytes_per_s,
            inputs.cluster.replication_bytes_per_s,
            inputs.replicas,
            reserved_d2h_bytes=log_bytes,
        )
        if is_redone := inputs.recovery is RecoveryKind.REDO:
            order = order_of(table)
            own = choose_window(table.with_gradients_for_compute(), order, budget, WindowKind.ROLLING)
        else:
            own = choose_window(table, order, budget, inputs.kind)
        ranks = shape.tables_of_ranks(inputs.regime, inputs.job.expert_parallel)
        return StagePlan(
            shape,
            table,
            order=order,
            ordering=ordering,
            budget=budget,
            own=own,
            window=own,
            log_bytes=log_bytes,
            rest=0,
            is_redone=is_redone,
            ranks=ranks,
        )

    def _shortest_period(self, stage: StagePlan) -> int:
        """Return the fewest iterations from one window's start to the next for which copies cost no more than the cap.

        The cap is :attr:`PlanInput.overhead_cap`. The result is at most :data:`MOST_PERIOD`, the limit of a live job,
        even if copies then cost more than the cap.
        """
        slowed_s = self.contended_s(stage.window_bytes)
        return math.ceil(min(MOST_PERIOD, slowed_s / (self.inputs.overhead_cap * self.inputs.iteration_s)))

    def contended_s(self, sent_bytes: float) -> float:
        """Return the seconds that training loses while a rank sends ``sent_bytes`` to each of its peers."""
        return self.inputs.contention * self.inputs.cluster.link_s(self.inputs.replicas * sent_bytes)

    @cached_property
    def binding_stage(self) -> StagePlan:
        """Stage that needs the largest window. Among several such stages, it is the one with the heaviest slot."""
        return max(self.stages, key=lambda stage: (stage.own.size, stage.window.peak_bytes))

    @property
    def lag(self) -> int:
        """Lag L: the time to send the heaviest slot from host memory to all peers, in iterations, rounded up."""
        return math.ceil(
            max(stage.budget.send_s(stage.window.peak_bytes) for stage in self.stages) / self.inputs.iteration_s
        )

    @property
    def stall_s(self) -> float:
        """Mean seconds that training waits for copies to the host in an iteration, on the stage that waits longest."""
        return max(
            sum(stage.budget.stall_s(slot) for slot in stage.window.slot_bytes[0]) / self.period
            for stage in self.stages
        )

    @property
    def behind_s(self) -> float:
        """Seconds by which the sends of a window last beyond the start of the next window; 0 if they end before it."""
        return max(
            0.0,
            max(sum(stage.budget.send_s(slot) for slot in stage.window.slot_bytes[0]) for stage in self.stages)
            - self.period * self.inputs.iteration_s,
        )

    @property
    def expected_rollback(self) -> float:
        """Mean iterations of work that a failure costs. The interrupted iteration counts as half."""
        return self.binding_stage.schedule.rollback(self.lag).mean

    @property
    def average_replayed(self) -> float:
        """Mean committed iterations that a recovery replays."""
        return self.expected_rollback - INTERRUPTED

    @property
    def most_replayed(self) -> int:
        """Largest number of committed iterations that a recovery replays."""
        return self.binding_stage.schedule.rollback(self.lag).most

    @cached_property
    def paper_window(self) -> PaperWindow:
        """Window by Algorithm 1 of the paper, for the stage with most bytes of full state.

        The algorithm assumes that all operators have the mean size. It considers only the bandwidth from device to
        host, and not the network.
        """
        stage = max(self.stages, key=lambda stage: stage.full_bytes)
        count = len(stage.table)
        return find_window_size(
            operators=count,
            iteration_s=self.inputs.iteration_s,
            compute_bytes=stage.compute_bytes / count,
            master_bytes=stage.full_bytes / count,
            optimizer_bytes=0,
            bytes_per_s=self.inputs.cluster.d2h_bytes_per_s,
        )

    @property
    def window_bytes(self) -> int:
        """Bytes of all slots of a window on the rank for which they are most."""
        return max(stage.window_bytes for stage in self.stages)

    @property
    def updates_s(self) -> float:
        """Seconds that a rank needs to repeat the updates of a window; 0 for a recovery by replay.

        Each update reads and writes the rank's full state.
        """
        if self.inputs.recovery is RecoveryKind.REPLAY:
            return 0.0
        return (self.size - 1) * 2 * max(stage.full_bytes for stage in self.stages) / DEVICE_BYTES_PER_S

    def redo(self) -> CheckpointPlan:
        """Return the plan of the same job with recovery by redo."""
        return CheckpointPlan(replace(self.inputs, recovery=RecoveryKind.REDO))

    @property
    def is_carried(self) -> bool:
        """True if a rank can copy and send every slot within one iteration."""
        return not any(stage.window.over_budget for stage in self.stages)
