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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moevement_core.engine.memory import IN_FLIGHT
from moevement_core.errors import WindowError
from moevement_core.operators import OperatorKind, OperatorTable
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.planning.cluster import Cluster
from moevement_core.planning.job import JobShape, OperatorShape, StageShape
from moevement_core.policy.holding import Kept, kept_of_table, most_held
from moevement_core.policy.popularity import Order, Ordering, order_operators
from moevement_core.policy.schedule import LAG_ALLOWANCE, LATE_AT_PEERS
from moevement_core.policy.window import (
    Budget,
    PaperWindow,
    Window,
    WindowKind,
    choose_window,
    find_window_size,
    impose_window,
    peak_of_window,
)
from moevement_core.precision import TABLE_7, Regime
from moevement_core.replication.parity.staging import AT_ONCE
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.snapshot.blocks import BLOCK
from moevement_core.strategies import DenseSchedule, MoEvement, Redo, RedoSchedule, SparseSchedule, Strategy
from moevement_core.strategies.config import RecoveryKind
from moevement_core.strategies.redo import order_of

DEVICE_BYTES_PER_S = 1e12
"""Assumed bytes per second that an update reads and writes in device memory: half of what NVIDIA states for the A100
80GB, 2 TB/s."""
_MASTER_BYTES = 4
"""Bytes of one element of master weights in FP32, the widest format in a snapshot."""
INTERRUPTED = 0.5
"""Mean share of an iteration that is done when a failure interrupts it.

The expected rollback includes this share. Numbers of replayed iterations count only committed iterations.
"""
DENSE_OVERHEAD = 0.03
"""Largest share of training time that dense checkpoints of CheckFreq may cost, as in MoEvement's section 5.2."""


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
        self._nodes = nodes = math.ceil(inputs.job.ranks / inputs.cluster.gpus_per_node)
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
        slowed_s = self.contended_s(float(stage.window.slot_bytes[0].sum()))
        return math.ceil(min(MOST_PERIOD, slowed_s / (self.inputs.overhead_cap * self._iteration_s)))

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
        return math.ceil(max(stage.budget.send_s(stage.window.peak_bytes) for stage in self.stages) / self._iteration_s)

    @property
    def _iteration_s(self) -> float:
        return self.inputs.iteration_s

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
            - self.period * self._iteration_s,
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

    def snapshot_memory(self, stage: StagePlan, *, lag: int | None = None) -> int:
        """Return the bytes of host memory for the snapshots that one rank keeps, as a mean over the ranks of its stage.

        Args:
            stage: plan of the rank's stage.
            lag: largest lag of peers, in iterations; None for the lag for which a live rank allocates memory.
        """
        return math.ceil(np.mean([most_held(kept, self._slots(stage, lag)) for kept in self._kept(stage)]))

    def own_memory(self, stage: StagePlan) -> int:
        """Return the bytes of host memory for a rank's own snapshots."""
        keeps_own_copies = (
            self.inputs.keeps_own_copies or self.inputs.to_disk
        )  # Windows on disk are written from own snapshots.
        if keeps_own_copies or self.inputs.members or not self.inputs.replicas:
            return self.snapshot_memory(stage)
        in_flight = math.ceil(np.mean([most_held(kept[:, :1], IN_FLIGHT) for kept in stage.kept]))
        return min(self.snapshot_memory(stage), in_flight)

    def parity_memory(self, stage: StagePlan) -> int:
        """Return the bytes of host memory that a rank needs to keep one parity sum of one parity group.

        A parity sum is as long as the longest snapshot of the group. The result includes buffers for the blocks of
        snapshots that the rank adds up at the same time.
        """
        longest = np.max(self._kept(stage), axis=0)
        tensor = max(
            tensor.elements * _MASTER_BYTES // operator.shards
            for operator in stage.shape.operators
            for tensor in operator.tensors
        )
        return most_held(longest, self._slots(stage, 0)) + AT_ONCE * (BLOCK + tensor)

    def _kept(self, stage: StagePlan) -> Sequence[Kept]:
        """Return the bytes that a rank keeps of each snapshot of a window, for each rank of a stage.

        A rank frees parts of a snapshot that later snapshots replace. With parity or windows on disk it frees nothing,
        because parity sums and files contain whole snapshots.
        """
        is_whole = self.inputs.members or self.inputs.to_disk
        return [kept[:, :1] for kept in stage.kept] if is_whole else stage.kept

    def _slots(self, stage: StagePlan, lag: int | None) -> int:
        return stage.schedule.retention(
            self._lag_allowed if lag is None else lag, to_disk=self.inputs.to_disk
        ).slots_at_first

    def log_memory(self, stage: StagePlan) -> int:
        """Return the bytes of host memory for a rank's boundary log.

        The log holds all iterations since the oldest snapshot from which a recovery may begin.
        """
        reach = stage.schedule.retention(self._lag_allowed, to_disk=self.inputs.to_disk).logged_at_first
        return reach * stage.log_bytes

    @property
    def _lag_allowed(self) -> int:
        return max(self.lag, LAG_ALLOWANCE)

    @property
    def host_memory(self) -> tuple[int, int, int]:
        """Bytes of host memory of a rank: its own snapshots, copies or parity for other ranks, and boundary logs.

        Snapshots, copies and parity are those of the stage with the heaviest snapshots. Logs are those of the stage
        with the largest logs.
        """
        heaviest = max(self.stages, key=self.snapshot_memory)
        if self.inputs.members:
            groups = -(-self._nodes // self.inputs.members)  # The members of a group are on different nodes.
            kept = math.ceil(self.inputs.replicas * groups * self.parity_memory(heaviest) / self._nodes)
        else:
            kept = self.inputs.replicas * self.snapshot_memory(heaviest, lag=LATE_AT_PEERS)
        return self.own_memory(heaviest), kept, max(self.log_memory(stage) for stage in self.stages)

    @property
    def host_memory_of_node(self) -> int:
        """Bytes of host memory that all ranks of a node need: :attr:`host_memory` times the ranks of a node."""
        return sum(self.host_memory) * min(self.inputs.cluster.gpus_per_node, self.inputs.job.ranks)

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
            iteration_s=self._iteration_s,
            compute_bytes=stage.compute_bytes / count,
            master_bytes=stage.full_bytes / count,
            optimizer_bytes=0,
            bytes_per_s=self.inputs.cluster.d2h_bytes_per_s,
        )

    def bandwidth_for(self, size: int) -> float:
        """Return the smallest bandwidth with which the window of the job has ``size`` iterations or fewer.

        Args:
            size: window in iterations.

        Returns:
            Bytes per second for the snapshots of one rank. A snapshot counts once, even if several peers receive it.
        """
        return max(peak_of_window(s.weighed, s.order, size, s.own.kind) for s in self.stages) / self._iteration_s

    @property
    def fetch_s(self) -> float:
        """Seconds in which a rank fetches all slots of a window from one peer, and copies them to its device."""
        cluster = self.inputs.cluster
        nbytes = max(int(stage.window.slot_bytes[0].sum()) for stage in self.stages)
        return nbytes / min(cluster.replication_bytes_per_s, cluster.d2h_bytes_per_s)

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

    def dense(self, interval: int | None = None) -> DensePlan:
        """Return the plan of dense checkpoints in peers' memory, for the same model and bandwidths.

        Args:
            interval: iterations from one checkpoint to the next. None: the shortest interval that meets two conditions:
                stalls stay within :data:`DENSE_OVERHEAD`, and one checkpoint ends before the next begins.
        """
        stage = max(self.stages, key=lambda stage: stage.full_bytes)
        copy_s = stage.full_bytes / self.inputs.cluster.d2h_bytes_per_s
        stall_s = max(0.0, copy_s - self._iteration_s)
        send_s = stage.budget.send_s(stage.full_bytes)
        hidden = max(1, math.ceil(stall_s / (DENSE_OVERHEAD * self._iteration_s)))
        interval = interval or max(hidden, math.ceil(max(copy_s, send_s) / self._iteration_s))
        sent_late = math.ceil(send_s / self._iteration_s)
        lag = math.ceil(copy_s / self._iteration_s) + sent_late
        schedule = DenseSchedule(stage.table, interval)
        own, kept = (
            schedule.retention(late, to_disk=self.inputs.to_disk).slots_at_first
            for late in (max(sent_late, LAG_ALLOWANCE), 0)
        )
        logged = schedule.retention(max(sent_late, LAG_ALLOWANCE), to_disk=self.inputs.to_disk).logged_at_first
        host_memory = (
            own * stage.full_bytes,
            self.inputs.replicas * kept * stage.full_bytes,
            logged * max(stage.log_bytes for stage in self.stages),
        )
        return DensePlan(
            bytes=stage.full_bytes,
            copy_s=copy_s,
            send_s=send_s,
            stall_s=stall_s,
            interval=interval,
            lag=lag,
            host_memory=host_memory,
        )

    def alternatives(self) -> Iterator[tuple[str, int]]:
        """Yield possible changes of the inputs: a description of each, and the window W that the plan then has.

        Each item changes one input: twice the bandwidth to the host, twice the network bandwidth, rolling instead of
        aligned windows (or the reverse), iterations twice as long, one replica less, or the number formats of a row of
        MoEvement's table 7.
        """
        inputs = replace(self.inputs, window=None)
        cluster, scaling = inputs.cluster, inputs.regime.scaling
        faster_copies = replace(cluster, d2h_bytes_per_s=2 * cluster.d2h_bytes_per_s)
        faster_network = cluster.with_faster_network(2)
        other = WindowKind.ROLLING if inputs.kind is WindowKind.ALIGNED else WindowKind.ALIGNED
        changes = {
            "twice the bandwidth from device to host": replace(inputs, cluster=faster_copies),
            "twice the network bandwidth": replace(inputs, cluster=faster_network),
            f"{other} window": replace(inputs, kind=other),
            "iterations twice as long": replace(inputs, iteration_s=2 * inputs.iteration_s),
        }
        if inputs.replicas:
            changes["one replica less"] = replace(inputs, replicas=inputs.replicas - 1)
        for regime in TABLE_7:
            changes[f"regime {regime}"] = replace(inputs, regime=replace(regime, scaling=scaling))
        for name, change in changes.items():
            yield name, CheckpointPlan(change).size


@dataclass(frozen=True)
class DensePlan:
    """Plan of dense checkpoints in the memory of peers, as in GEMINI, for a rank of the stage with most bytes of state.

    The default interval keeps the overhead within CheckFreq's bound of 3%.
    """

    bytes: int
    copy_s: float
    send_s: float
    """Seconds to send a checkpoint to every peer."""
    stall_s: float
    """Seconds by which one checkpoint delays training, because its copy to the host takes longer than an iteration."""
    interval: int
    """Iterations from one checkpoint to the next.

    The default is the shortest interval for which stalls cost at most 3% of training time, and one checkpoint ends
    before the next begins.
    """

    lag: int
    """Lag of a checkpoint: iterations from its start until every peer has received it."""
    host_memory: tuple[int, int, int]
    """Bytes of host memory of a rank with ``--moevement-strategy dense``.

    The three numbers are for the rank's own checkpoints, for copies that it keeps for other ranks, and for its boundary
    log.
    """

    def fetch_s(self, cluster: Cluster) -> float:
        """Return the seconds that a rank needs to fetch a checkpoint from one peer and copy it to its device."""
        return self.bytes / min(cluster.replication_bytes_per_s, cluster.d2h_bytes_per_s)

    @property
    def expected_rollback(self) -> float:
        """Mean iterations of work that a failure costs: half of the interval (MoEvement, section 3.6), plus the lag."""
        return self.interval / 2 + self.lag

    @property
    def average_replayed(self) -> float:
        """Mean committed iterations that a recovery replays."""
        return self.expected_rollback - INTERRUPTED

    @property
    def most_replayed(self) -> int:
        """Largest number of committed iterations that a recovery replays."""
        return self.interval - 1 + self.lag
