"""Cost of sparse checkpointing for a job, before it runs: window, slots, traffic, host memory, rollback.

The arithmetic is that of the live run: the same tables, windows and bounds. What only a run knows is assumed: every
operator is cut evenly over the ranks that share it, experts are equally popular, and copies and sends go at the
bandwidths given.
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
from moevement_core.strategies.config import Recovery
from moevement_core.strategies.redo import order_of

DEVICE_BYTES_PER_S = 1e12
"""Rate of device memory in an update: half of the 2 TB/s in NVIDIA's data sheet of the A100 with 80 GB."""
_MASTER_BYTES = 4
"""Bytes of an element of the widest tensor in a snapshot."""
INTERRUPTED = 0.5
"""Iterations of work that a failure takes from the iteration under way, on average; no replay counts them."""
DENSE_OVERHEAD = 0.03
"""CheckFreq's bound on the runtime overhead of dense checkpoints, as MoEvement configures it (section 5.2)."""


@dataclass(frozen=True)
class PlanInput:
    """Everything a plan follows from."""

    job: JobShape
    cluster: Cluster
    regime: Regime
    iteration_s: float
    kind: WindowKind = WindowKind.ALIGNED
    replicas: int = 2
    """Copies of each snapshot, or blocks of parity of each group."""
    window: int | None = None
    """An imposed window; left out it is chosen."""
    period: int | None = None
    """Iterations from one window to the next, imposed; left out as many as the cap on overhead asks for."""
    contention: float = 0.0
    """Share of the seconds in which links could carry nothing but the copies, by which those lengthen training; 0 hides
    them wholly.
    """
    overhead_cap: float = OVERHEAD_CAP
    """Share of an iteration's time that this may be, before windows become rarer."""
    recovery: Recovery = Recovery.REPLAY
    """Way to recover: replay or redo."""
    members: int = 0
    """Members of a group of whose snapshots parity is kept; 0: copies are kept."""
    keeps_own: bool = True
    """True if ranks keep their own snapshots when all peers have them."""
    to_disk: bool = False
    """True if windows are written to disk, too."""


@dataclass(frozen=True)
class StagePlan:
    """Plan of one stage, of which one rank stands for all."""

    shape: StageShape
    table: OperatorTable
    order: Order
    ordering: Ordering
    budget: Budget
    own: Window
    """The smallest window that this stage needs."""
    window: Window
    """Slots of the stage in the window of the job."""
    log_bytes: int
    """Boundary log of an iteration."""
    rest: int
    """Iterations between a window of the job and the next one."""
    is_redone: bool
    """True if slots hold gradients where they would hold compute weights."""
    ranks: OperatorTable
    """Operators with a row for each rank; ranks have whole experts and unequal parts of layers."""

    @property
    def weighed(self) -> OperatorTable:
        """The table that slots are cut by."""
        return self.table.with_gradients_for_compute() if self.is_redone else self.table

    @cached_property
    def strategy(self) -> Strategy:
        """Strategy that a live rank of the stage would use."""
        windows = MoEvement(self.table, self.window.kind, self.window.size)
        return Redo(self.table, windows) if self.is_redone else windows

    @cached_property
    def schedule(self) -> SparseSchedule:
        """Schedule by which a live rank of the stage saves."""
        kind = RedoSchedule if self.is_redone else SparseSchedule
        return kind(self.table, self.order, self.window, rest=self.rest)

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """Bytes of each snapshot of a window on each of its ranks, in the window of the job."""
        ranks = self.ranks
        order = order_of(ranks) if self.is_redone else _first_order(ranks, self.ordering)
        weighed = ranks.with_gradients_for_compute() if self.is_redone else ranks
        window = impose_window(weighed, order, self.window.size, self.window.kind, self.budget.bytes)
        schedule = (RedoSchedule if self.is_redone else SparseSchedule)(ranks, order, window, rest=self.rest)
        return tuple(kept_of_table(schedule, rank) for rank in range(len(ranks.full)))

    @cached_property
    def operators(self) -> tuple[OperatorShape, ...]:
        """Operators of the shape, in the order of the table."""
        by_name = {operator.name: operator for operator in self.shape.operators}
        return tuple(by_name[name] for name in self.table.names)

    @property
    def full_bytes(self) -> int:
        """Full state of all its operators: a dense checkpoint of the rank."""
        return int(self.table.full.sum())

    @property
    def compute_bytes(self) -> int:
        """Compute weights of all its operators."""
        return int(self.table.compute.sum())


def _first_order(table: OperatorTable, ordering: Ordering) -> Order:
    """Return the order before any popularity is known."""
    return order_operators(table, np.zeros(len(table)), ordering)


class CheckpointPlan:
    """The plan of a job; every figure is of one rank unless it says otherwise.

    Raises:
        WindowError: no bandwidth, no iteration time, more replicas than there are other nodes.
    """

    def __init__(self, given: PlanInput) -> None:
        self.given = given
        self._nodes = nodes = math.ceil(given.job.ranks / given.cluster.gpus_per_node)
        if given.members and nodes < given.members + given.replicas:
            raise WindowError(
                f"parity:{given.members}+{given.replicas} on {nodes} nodes; needs {given.members + given.replicas}"
            )
        if 0 < nodes - 1 < given.replicas:
            raise WindowError(
                f"{given.replicas} replicas on {nodes} nodes; needs as many other nodes: at most {nodes - 1} replicas, "
                "or more nodes"
            )
        cut = [self._stage(shape) for shape in given.job.stages]
        if given.window is not None and given.window > (most := max(len(stage.table) for stage in cut)):
            raise WindowError(
                f"window {given.window}: no stage has more than {most} operators, so slots would be empty; needs "
                f"{most} or less"
            )
        self.size: int = given.window or max(stage.own.size for stage in cut)
        """W of the job, iterations: the largest that one of its stages needs."""
        stages = [
            stage
            if stage.own.size == self.size
            else replace(
                stage,
                window=impose_window(stage.weighed, stage.order, self.size, stage.own.kind, stage.budget.bytes),
            )
            for stage in cut
        ]
        if given.period is not None and not self.size <= given.period <= MOST_PERIOD:
            raise WindowError(
                f"period {given.period}: windows have {self.size} iterations; needs {self.size} to {MOST_PERIOD}"
            )
        self.period: int = given.period or max(self.size, *map(self._shortest_period, stages))
        """Iterations from one window of the job to the next: W, and the rest after it."""
        self.stages: tuple[StagePlan, ...] = tuple(replace(stage, rest=self.period - self.size) for stage in stages)

    def _stage(self, shape: StageShape) -> StagePlan:
        given = self.given
        table = shape.table(given.regime)
        dense = not any(o.kind is OperatorKind.EXPERT for stage in given.job.stages for o in stage.operators)
        ordering = Ordering.BACK_TO_FRONT if dense else Ordering.HARD_COUNT
        order = _first_order(table, ordering)
        log_bytes = given.job.log_bytes_of(shape)
        budget = Budget(
            given.iteration_s,
            given.cluster.d2h_bytes_per_s,
            given.cluster.replication_bytes_per_s,
            given.replicas,
            reserved_d2h_bytes=log_bytes,
        )
        if is_redone := given.recovery is Recovery.REDO:
            order = order_of(table)
            own = choose_window(table.with_gradients_for_compute(), order, budget, WindowKind.ROLLING)
        else:
            own = choose_window(table, order, budget, given.kind)
        ranks = shape.tables_of_ranks(given.regime, given.job.expert_parallel)
        return StagePlan(shape, table, order, ordering, budget, own, own, log_bytes, 0, is_redone, ranks)

    def _shortest_period(self, stage: StagePlan) -> int:
        """Return the fewest iterations from one window to the next in which copies slow training by the cap at most, or
        the most that a live job takes.
        """
        slowed_s = self.contended_s(float(stage.window.slot_bytes[0].sum()))
        return math.ceil(min(MOST_PERIOD, slowed_s / (self.given.overhead_cap * self._iteration_s)))

    def contended_s(self, sent_bytes: float) -> float:
        """Return the seconds by which training takes longer beside copies of so many bytes of a rank to each peer."""
        return self.given.contention * self.given.cluster.link_s(self.given.replicas * sent_bytes)

    @cached_property
    def binding_stage(self) -> StagePlan:
        """The stage that needs the largest window, of several the one with the heaviest slot."""
        return max(self.stages, key=lambda stage: (stage.own.size, stage.window.peak_bytes))

    @property
    def lag(self) -> int:
        """L: iterations that the heaviest slot takes to reach the peers once it is in host memory."""
        return math.ceil(max(stage.budget.send_s(stage.window.peak_bytes) for stage in self.stages) / self._iteration_s)

    @property
    def _iteration_s(self) -> float:
        return self.given.iteration_s

    @property
    def stall_s(self) -> float:
        """Seconds that training waits for copies, a window's average iteration on the stage that waits longest."""
        return max(
            sum(stage.budget.stall_s(slot) for slot in stage.window.slot_bytes[0]) / self.period
            for stage in self.stages
        )

    @property
    def behind_s(self) -> float:
        """Seconds by which replication falls behind in every window; 0 if the network keeps up."""
        return max(
            0.0,
            max(sum(stage.budget.send_s(slot) for slot in stage.window.slot_bytes[0]) for stage in self.stages)
            - self.period * self._iteration_s,
        )

    @property
    def expected_rollback(self) -> float:
        """Iterations of work that a failure costs on average, half of the interrupted one among them."""
        return self.binding_stage.schedule.expected_rollback(self.lag)

    @property
    def average_replayed(self) -> float:
        """Committed iterations that a recovery replays on average."""
        return self.expected_rollback - INTERRUPTED

    @property
    def most_replayed(self) -> int:
        """Committed iterations that a recovery replays at most."""
        return self.binding_stage.schedule.most_replayed(self.lag)

    def snapshot_memory(self, stage: StagePlan, *, lag: int | None = None) -> int:
        """Host bytes for all snapshots of a rank that are kept at a time, the mean over the ranks of its stage.

        Args:
            stage: of the rank.
            lag: iterations by which peers may trail; left out as many as are set aside on the rank itself.
        """
        return math.ceil(np.mean([most_held(kept, self._slots(stage, lag)) for kept in self._kept(stage)]))

    def own_memory(self, stage: StagePlan) -> int:
        """Return the host bytes of a rank's own snapshots."""
        keeps_own = self.given.keeps_own or self.given.to_disk  # it writes its own to disk
        if keeps_own or self.given.members or not self.given.replicas:
            return self.snapshot_memory(stage)
        in_flight = math.ceil(np.mean([most_held(kept[:, :1], IN_FLIGHT) for kept in stage.kept]))
        return min(self.snapshot_memory(stage), in_flight)

    def parity_memory(self, stage: StagePlan) -> int:
        """Host bytes of a sum over the snapshots of a group, as long as the longest, and of what comes at a time."""
        longest = np.max(self._kept(stage), axis=0)
        tensor = max(
            tensor.elements * _MASTER_BYTES // operator.shards
            for operator in stage.shape.operators
            for tensor in operator.tensors
        )
        return most_held(longest, self._slots(stage, 0)) + AT_ONCE * (BLOCK + tensor)

    def _kept(self, stage: StagePlan) -> Sequence[Kept]:
        """Return the bytes held of each snapshot. Parts of sums, and of what is written to disk, are not released by
        themselves.
        """
        is_whole = self.given.members or self.given.to_disk
        return [kept[:, :1] for kept in stage.kept] if is_whole else stage.kept

    def _slots(self, stage: StagePlan, lag: int | None) -> int:
        return stage.schedule.slots_at_first(self._lag_allowed if lag is None else lag, to_disk=self.given.to_disk)

    def log_memory(self, stage: StagePlan) -> int:
        """Host bytes for the boundary log: as many iterations as a recovery may begin with, and the one under way."""
        reach = stage.schedule.iterations_logged_at_first(self._lag_allowed, to_disk=self.given.to_disk)
        return reach * stage.log_bytes

    @property
    def _lag_allowed(self) -> int:
        return max(self.lag, LAG_ALLOWANCE)

    @property
    def host_memory(self) -> tuple[int, int, int]:
        """Host bytes of a rank of the heaviest stage: own snapshots, those of others or its share
        of parity, and logs.
        """
        heaviest = max(self.stages, key=self.snapshot_memory)
        if self.given.members:
            groups = -(-self._nodes // self.given.members)  # of one rank of each node
            kept = math.ceil(self.given.replicas * groups * self.parity_memory(heaviest) / self._nodes)
        else:
            kept = self.given.replicas * self.snapshot_memory(heaviest, lag=LATE_AT_PEERS)
        return self.own_memory(heaviest), kept, max(self.log_memory(stage) for stage in self.stages)

    @property
    def host_memory_of_node(self) -> int:
        """Host bytes of a node: all three for every rank."""
        return sum(self.host_memory) * min(self.given.cluster.gpus_per_node, self.given.job.ranks)

    @cached_property
    def paper_window(self) -> PaperWindow:
        """Algorithm 1 on the heaviest stage: operators all of the average size, device-to-host bandwidth only."""
        stage = max(self.stages, key=lambda stage: stage.full_bytes)
        count = len(stage.table)
        return find_window_size(
            count,
            self._iteration_s,
            stage.compute_bytes / count,
            stage.full_bytes / count,
            0,
            self.given.cluster.d2h_bytes_per_s,
        )

    def bandwidth_for(self, size: int) -> float:
        """Bytes per second for the snapshots of one rank, each counted once, from which W is ``size`` or smaller."""
        return max(peak_of_window(s.weighed, s.order, size, s.own.kind) for s in self.stages) / self._iteration_s

    @property
    def fetch_s(self) -> float:
        """Seconds until a rank has all slots of a window from one peer, and on its device."""
        cluster = self.given.cluster
        nbytes = max(int(stage.window.slot_bytes[0].sum()) for stage in self.stages)
        return nbytes / min(cluster.replication_bytes_per_s, cluster.d2h_bytes_per_s)

    @property
    def updates_s(self) -> float:
        """Seconds in which a rank makes updates of a window again: each reads and writes its full state."""
        if self.given.recovery is Recovery.REPLAY:
            return 0.0
        return (self.size - 1) * 2 * max(stage.full_bytes for stage in self.stages) / DEVICE_BYTES_PER_S

    def redo(self) -> CheckpointPlan:
        """The same job, recovered by redo."""
        return CheckpointPlan(replace(self.given, recovery=Recovery.REDO))

    @property
    def is_carried(self) -> bool:
        """True if every slot is copied and sent while an iteration runs."""
        return not any(stage.window.over_budget for stage in self.stages)

    def dense(self, interval: int | None = None) -> DensePlan:
        """Return the plan of dense checkpoints in peers' memory, of the same model at the same bandwidths.

        Args:
            interval: iterations from one to the next; left out the shortest that stalls within the bound on overhead
                and at which one checkpoint ends before the next begins.
        """
        stage = max(self.stages, key=lambda stage: stage.full_bytes)
        copy_s = stage.full_bytes / self.given.cluster.d2h_bytes_per_s
        stall_s = max(0.0, copy_s - self._iteration_s)
        send_s = stage.budget.send_s(stage.full_bytes)
        hidden = max(1, math.ceil(stall_s / (DENSE_OVERHEAD * self._iteration_s)))
        interval = interval or max(hidden, math.ceil(max(copy_s, send_s) / self._iteration_s))
        sent_late = math.ceil(send_s / self._iteration_s)
        lag = math.ceil(copy_s / self._iteration_s) + sent_late
        schedule = DenseSchedule(stage.table, interval)
        own, kept = (
            schedule.slots_at_first(late, to_disk=self.given.to_disk) for late in (max(sent_late, LAG_ALLOWANCE), 0)
        )
        logged = schedule.iterations_logged_at_first(max(sent_late, LAG_ALLOWANCE), to_disk=self.given.to_disk)
        host_memory = (
            own * stage.full_bytes,
            self.given.replicas * kept * stage.full_bytes,
            logged * max(stage.log_bytes for stage in self.stages),
        )
        return DensePlan(stage.full_bytes, copy_s, send_s, stall_s, interval, lag, host_memory)

    def alternatives(self) -> Iterator[tuple[str, int]]:
        """Yield changes of W: twice each bandwidth, the other window kind, fewer replicas, other regimes, each with its
        W.
        """
        given = replace(self.given, window=None)
        cluster, scaling = given.cluster, given.regime.scaling
        faster_copies = replace(cluster, d2h_bytes_per_s=2 * cluster.d2h_bytes_per_s)
        faster_network = cluster.with_faster_network(2)
        other = WindowKind.ROLLING if given.kind is WindowKind.ALIGNED else WindowKind.ALIGNED
        changes = {
            "twice the bandwidth from device to host": replace(given, cluster=faster_copies),
            "twice the network bandwidth": replace(given, cluster=faster_network),
            f"{other} window": replace(given, kind=other),
            "iterations twice as long": replace(given, iteration_s=2 * given.iteration_s),
        }
        if given.replicas:
            changes["one replica less"] = replace(given, replicas=given.replicas - 1)
        for regime in TABLE_7:
            changes[f"regime {regime}"] = replace(given, regime=replace(regime, scaling=scaling))
        for what, change in changes.items():
            yield what, CheckpointPlan(change).size


@dataclass(frozen=True)
class DensePlan:
    """A dense checkpoint of the heaviest rank: Gemini's, in peers' memory, with CheckFreq's bound on overhead."""

    bytes: int
    copy_s: float
    send_s: float
    """Seconds until every peer has it."""
    stall_s: float
    """Seconds by which one checkpoint delays training: a copy that outlasts the iteration it hides in."""
    interval: int
    """The shortest interval, iterations, at which stalls stay within 3% and one checkpoint ends before the next."""

    lag: int
    """Iterations from the state that a checkpoint holds until every peer has it."""
    host_memory: tuple[int, int, int]
    """Bytes of a rank that ``--moevement-strategy dense`` sets aside: own snapshots, those of others, and logs."""

    def fetch_s(self, cluster: Cluster) -> float:
        """Seconds until a rank has it from one peer, and on its device."""
        return self.bytes / min(cluster.replication_bytes_per_s, cluster.d2h_bytes_per_s)

    @property
    def expected_rollback(self) -> float:
        """Iterations of work that a failure costs on average: half the interval (MoEvement section 3.6) and the lag."""
        return self.interval / 2 + self.lag

    @property
    def average_replayed(self) -> float:
        """Committed iterations that are replayed on average."""
        return self.expected_rollback - INTERRUPTED

    @property
    def most_replayed(self) -> int:
        """Committed iterations that are replayed at most."""
        return self.interval - 1 + self.lag
