"""Interface through which the engine and the session use a checkpointing strategy.

A strategy is pure: it receives token counts, measurements and the contents of snapshots, and returns schedules and
restore points. Every rank of a pipeline stage has an equal strategy and makes the same calls. So all ranks of the stage
get the same answers without communication.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moevement_core.operators import OperatorTable
from moevement_core.overhead.cap import Evidence, factor, safe_factor, worthwhile
from moevement_core.policy.popularity import Ordering
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.runs import open_starts, restore_points
from moevement_core.policy.schedule import Contents, Schedule
from moevement_core.policy.window import Budget
from moevement_core.replication.placement import PlacementKind

LEAST_COPIED = 0.25
"""Least share of the copy bandwidth that is left for snapshots, even if the boundary log is large."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one rank, from which a strategy chooses windows and intervals."""

    iteration_s: float
    """Seconds of an iteration without saving; before such an iteration has run, seconds of any iteration."""
    d2h_bytes_per_s: float
    replication_bytes_per_s: float
    """Bytes per second that links carry for snapshots of this rank, to all peers together."""
    replicas: int
    disk_bytes_per_s: float = float("inf")
    """Bytes per second at which snapshots were written to disk."""
    delay_s: float = 0.0
    """Seconds by which the snapshots of the last window delayed training, stalls included."""
    logged_bytes: float = 0.0
    """Bytes that the boundary log copies from the device in an iteration."""
    cost: Evidence | None = None
    """Measured cost of saving, the same on all ranks; None before it is measured."""
    shortened: float = 0.0
    """Twice the mean iterations of a rollback that more frequent windows would save: the period with replay."""
    failures_every: float = math.inf
    """Mean iterations between failures so far; infinite if failures do not matter to the cost that is allowed."""

    @property
    def worth(self) -> float:
        """Share of training time that saving should cost because ranks fail; 0.0 if that is not known."""
        return 0.0 if self.cost is None else worthwhile(self.cost, self.shortened, self.failures_every)

    @property
    def copies(self) -> Budget:
        """Budget for copying snapshots from device to host in an iteration.

        The boundary log uses the same bandwidth and comes first. At least the share :data:`LEAST_COPIED` of the
        bandwidth is left for snapshots.
        """
        logged_bytes = min(self.logged_bytes, (1 - LEAST_COPIED) * self.d2h_bytes_per_s * self.iteration_s)
        return Budget(self.iteration_s, self.d2h_bytes_per_s, replicas=0, reserved_d2h_bytes=logged_bytes)

    @property
    def link_bytes(self) -> float:
        """Bytes of snapshots that links carry to each peer in an iteration; infinite without peers."""
        return self.replication_bytes_per_s * self.iteration_s / self.replicas if self.replicas else math.inf

    def bytes_to_save(self, now_bytes: float, cap: float, *, is_other_form: bool = False) -> float:
        """Return the bytes that an iteration may save, limited by the links and by the cap on overhead.

        Args:
            now_bytes: mean bytes that an iteration saves now, over a window.
            cap: share of training time that saving may cost.
            is_other_form: True if windows will have another number of snapshots, so that their cost is not known.
        """
        if is_other_form and self.worth <= cap:
            return min(self.link_bytes, now_bytes * safe_factor(self.cost, cap))
        return min(self.link_bytes, now_bytes * factor(self.cost, cap, self.worth))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Schedules that a strategy proposes from the next window on."""

    schedules: Sequence[Schedule]
    """Proposed schedules, the preferred one first.

    The job uses the first schedule that fits into host memory, and decides at which iteration this schedule begins.
    """
    is_change: bool
    """True if the preferred schedule differs from the schedule in force."""
    reorders: bool = False
    """True if the preferred schedule saves operators in another order than the schedule in force."""
    why: str = ""
    """Log line with the chosen recovery method and the measurements that decided; empty if there was no choice."""


@dataclass(frozen=True)
class StageOperators:
    """Operators of a pipeline stage, and what its strategy has to know of the other stages."""

    table: OperatorTable
    most_experts: int | None = None
    """Experts in the largest layer of the job; None to use the largest layer of this stage."""
    capacities: Mapping[str, float] | None = None
    """Most tokens of a batch that each expert accepts, by operator name; None if the strategy needs no capacities."""


class Strategy(ABC):
    """Checkpointing strategy of one pipeline stage.

    Args:
        table: the operators of the stage.
    """

    name: ClassVar[str]
    rolls_back_all: ClassVar[bool] = False
    """True if all ranks roll back after a failure; False if only the stages that lost state roll back."""
    only_to_disk: ClassVar[bool] = False
    """True if restore points are on disk only, and peers receive no copies."""
    is_tuned: ClassVar[bool] = False
    """True if measurements may change the window size again and again; False if it is chosen once."""
    sizes_are_iterations: ClassVar[bool] = True
    """True if :meth:`wanted_sizes` returns iterations, which ranks limit to ``MOST_PERIOD``."""
    paces_copies: ClassVar[bool] = False
    """True if copies are sent only while training leaves the network idle."""
    flags: ClassVar[frozenset[str]] = frozenset()
    """Fields of ``StrategyConfig`` that have an effect on this strategy. If another one is given, the job refuses it.

    Fields that every strategy ignores without refusing them, because they have defaults, need not be here.
    """
    cap_by_default: ClassVar[float | None] = None
    """Share of training time that saving may cost if the user gives none; None for no limit."""
    exceeds_cap: ClassVar[bool] = False
    """True if the strategy exceeds :attr:`cap_by_default` while ranks fail often."""
    interval_by_default: ClassVar[int | None] = None
    """Iterations from one snapshot to the next if the user gives no number; None: the strategy chooses."""
    placement: ClassVar[PlacementKind] = PlacementKind.SPREAD
    """Placement of copies if the user gives none."""
    orders_by_popularity: ClassVar[bool] = False
    """True if the popularity of experts decides the order of operators."""
    chains_gradients: ClassVar[bool] = False
    """True if a snapshot of each iteration may hold gradients in place of state that the snapshot before it holds."""
    selects_by_load: ClassVar[bool] = False
    """True if routed tokens decide which experts a rank saves."""
    counts: Ordering | None = None
    """Statistic of expert popularity that routers count for this strategy; None if it needs no counts."""

    def __init__(self, table: OperatorTable) -> None:
        self.table = table
        self.settled = True
        """True if measurements no longer change the window size."""

    @classmethod
    @abstractmethod
    def of(cls, config: Any, stage: StageOperators) -> Strategy:
        """Return the strategy of a stage.

        Args:
            config: flags of the strategy, a ``StrategyConfig``.
            stage: operators of the stage.

        Raises:
            ConfigError: the flags do not fit the operators.
        """

    @abstractmethod
    def first(self, start: int, most: int) -> Schedule:
        """Return the schedule that is in force before the first measurements.

        Args:
            start: iteration whose state the job begins from; the snapshots up to ``SS_start`` together hold it.
            most: largest possible number of slots in a window: the number of operators of the largest stage.
        """

    def restore_points(self, held: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
        """Yield the runs of snapshots that restore a state, the newest first.

        Args:
            held: contents of each available snapshot, by iteration.
            until: iteration to recover; later snapshots are not used.
        """
        return restore_points(held, until)

    def open_starts(self, held: Mapping[int, Contents], *, is_gapless: bool) -> Iterator[int]:
        """Yield the first iterations of restore points that are complete or may still become complete.

        Args:
            held: contents of each available snapshot, by iteration.
            is_gapless: True if the newest available snapshot is the last one captured.
        """
        return open_starts(held, is_gapless=is_gapless)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return the sizes that this rank needs; for each size, the job uses the largest value of all ranks.

        Args:
            now: newest schedule.
            measured: measurements of this rank.

        Returns:
            Windows or intervals in iterations, or other numbers that :meth:`propose` of the same strategy understands.
        """
        return (now.size,)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Return the schedules that should come into force at the next window boundary.

        Args:
            now: newest schedule, in force or already decided on.
            sizes: largest values of :meth:`wanted_sizes` over all ranks; None if nothing was measured.
        """
        return Proposal([now], is_change=False)

    def accept(self, proposal: Proposal) -> None:  # noqa: B027
        """Record that the job has accepted ``proposal``."""

    def learned(self) -> Any:
        """Return what this strategy has learned from counts and measurements, as plain data.

        A rank that joins the stage passes it to :meth:`adopt`.
        """
        return None

    def adopt(self, learned: Any) -> None:  # noqa: B027
        """Take over the result of :meth:`learned` from another rank of the stage."""
