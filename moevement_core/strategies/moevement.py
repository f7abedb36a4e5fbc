"""MoEvement (section 3): saves the state in slices, one in each iteration, the most popular experts in the last slices.

The number of slices in a window follows from the bandwidth of copies from device to host (the paper's Algorithm 1). If
links or the cap on overhead do not allow one window right after the other, windows have a rest: iterations without a
snapshot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moevement_core.operators import OperatorTable
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.policy.popularity import Order, OrderingConfig, Popularity, Scores, counts_of
from moevement_core.policy.reorder import ReorderThresholds, ReorderTrigger
from moevement_core.policy.schedule import Schedule
from moevement_core.policy.window import WindowKind, choose_window, impose_window, shortest_period
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.strategies.capabilities import CountsTokens
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.sparse import SparseSchedule
from moevement_core.strategies.strategy import Measured, Proposal, StageOperators, Strategy

FIRST_WINDOW = 8
"""Snapshots of a window, W, before anything is measured."""
NEAR = (0.8, 1.25)
"""Limits of the ratio of a new period to the current one. A new period between these limits is ignored.

Measurements fluctuate by that much.
"""


class MoEvement(Strategy, CountsTokens):
    """Strategy of sparse windows whose order and size follow measurements.

    Args:
        table: the operators of the stage.
        kind: aligned or rolling windows.
        size: W, for windows with a snapshot in every iteration; None to choose W and the period from measurements.
        ordering: statistic that orders the operators.
        thresholds: thresholds for changes of popularity that trigger a new order.
        cap: share of training time that saving may cost.
        capacity: most tokens of a batch that each operator accepts, float64 ``[operators]``. None unless ``ordering``
            needs it.
    """

    name = "moevement"
    is_tuned = True
    flags = frozenset({"window", "overhead_cap", "recovery"})
    cap_by_default = OVERHEAD_CAP
    exceeds_cap = True
    orders_by_popularity = True

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> MoEvement:
        """Return the strategy of a stage; see :meth:`Strategy.of`.

        Raises:
            PopularityError: an expert has no capacity, or the capacity is not above 0.
        """
        capacities = stage.capacities
        return cls(
            stage.table,
            kind=config.window_kind,
            size=config.window,
            ordering=config.ordering,
            thresholds=config.thresholds,
            cap=config.cap,
            capacity=None if capacities is None else counts_of(stage.table, capacities, "capacity"),
        )

    def __init__(
        self,
        table: OperatorTable,
        kind: WindowKind = WindowKind.ALIGNED,
        size: int | None = None,
        ordering: OrderingConfig | None = None,
        thresholds: ReorderThresholds | None = None,
        cap: float = OVERHEAD_CAP,
        capacity: Scores | None = None,
    ) -> None:
        super().__init__(table)
        self.kind, self.size, self.cap = kind, size, cap
        self.popularity = Popularity(table, ordering or OrderingConfig(), capacity)
        self.trigger = ReorderTrigger(table, thresholds or ReorderThresholds())
        self.counts = self.popularity.config.ordering
        self.settled = size is not None

    def first(self, start: int, most: int) -> SparseSchedule:
        """Return the schedule whose first window ends before ``start`` and holds the job's first state."""
        size = min(self.size or FIRST_WINDOW, most)
        return replace(self._schedule(self.popularity.order(), size), start=start - size)

    def observe(self, counts: Scores) -> None:
        """Add routed tokens to the popularity of the experts."""
        self.popularity.observe(counts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return W and the period that follow from this rank's measurements.

        W is the smallest number of snapshots in a window for which a rank can copy each snapshot from the device within
        one iteration. The period is the smallest number of iterations from the beginning of one window to the beginning
        of the next that links and the cap on overhead allow.
        """
        assert isinstance(now, SparseSchedule)
        return self.sizes(now, self._order(now), measured)

    def sizes(
        self, now: SparseSchedule, order: Order, measured: Measured, *, has_gradients: bool = False
    ) -> tuple[int, int]:
        """Return W and the period for an order of the operators, as :meth:`wanted_sizes` explains.

        While the cost of saving is not measured, windows do not come more often. Unless links or copies need rarer
        windows, both numbers then stay, because a change would begin the measurement again.

        Args:
            now: schedule in force.
            order: order of the operators.
            measured: measurements of this rank.
            has_gradients: True if the snapshots of ``now`` have gradients, which the new ones do not have.
        """
        if self.size is not None:
            return self.size, self.size
        window = choose_window(self.table, order, measured.copies, self.kind)
        window_bytes = float(window.slot_bytes.sum(axis=1).max())
        is_other_form = has_gradients or window.size != now.window.size
        to_save = measured.bytes_to_save(now.mean_bytes, self.cap, is_other_form=is_other_form)
        period = shortest_period(window_bytes, window.size, to_save, MOST_PERIOD)
        if measured.cost is None and period <= now.size:
            return window.size if has_gradients else now.window.size, now.size
        return window.size, period

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Propose a schedule with the W and period in ``sizes``; the alternative has the present W and period.

        Both schedules have the same order of operators. It is a new order if the popularity of enough experts has
        changed, and the present order otherwise.
        """
        assert isinstance(now, SparseSchedule)
        size, period = now.window.size, now.size
        if sizes is not None and not is_near(now, *sizes):
            size, period = sizes
        order, reorders = self._order(now), self._reorders()
        schedules = [self._schedule(order, size, period), self._schedule(order, now.window.size, now.size)]
        is_change = reorders or (size, period) != (now.window.size, now.size)
        return Proposal(schedules, is_change=is_change, reorders=reorders)

    def accept(self, proposal: Proposal) -> None:
        """Record the present popularity if ``proposal`` reorders operators.

        Later calls of :meth:`propose` reorder again when popularity has changed enough since then.
        """
        if proposal.reorders:
            self.trigger.ordered(self.popularity.scores)

    def learned(self) -> tuple[Scores, Scores | None]:
        """Return the present popularity of experts, and the popularity from which the current order was made."""
        return self.popularity.scores, self.trigger.reference

    def adopt(self, learned: Any) -> None:
        """Take over the result of :meth:`learned` from another rank."""
        self.popularity.scores, self.trigger.reference = learned

    def _reorders(self) -> bool:
        return self.trigger.should_reorder(self.popularity.scores)

    def _order(self, now: Schedule) -> Order:
        assert isinstance(now, SparseSchedule)
        return self.popularity.order() if self._reorders() else now.order

    def _schedule(self, order: Order, size: int, period: int = 0) -> SparseSchedule:
        window = impose_window(self.table, order, size, self.kind)
        return SparseSchedule(self.table, order, window, rest=max(0, period - size))


def is_near(now: SparseSchedule, size: int, period: int) -> bool:
    """Return True if a window of ``size`` snapshots every ``period`` iterations is close to that of ``now``."""
    least, most = NEAR
    return size == now.window.size and least * now.size <= max(size, period) <= most * now.size
