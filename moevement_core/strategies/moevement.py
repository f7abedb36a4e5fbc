"""MoEvement (section 3): a slice of the state in every iteration, the most popular experts last."""

from __future__ import annotations

from typing import Any

from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Order, OrderingConfig, Popularity, Scores
from moevement_core.policy.reorder import ReorderThresholds, ReorderTrigger
from moevement_core.policy.schedule import Schedule
from moevement_core.policy.window import Budget, WindowKind, choose_window, impose_window
from moevement_core.strategies.sparse import SparseSchedule
from moevement_core.strategies.strategy import Measured, Proposal, Strategy

FIRST_WINDOW = 8
"""W before anything is measured."""


class MoEvement(Strategy):
    """Sparse windows, in an order and of a size that follow the run.

    Args:
        table: the operators of the stage.
        kind: of the windows.
        size: W; nothing for the smallest that fits into what is measured.
        ordering: by what operators are ordered.
        thresholds: when they are reordered.
    """

    name = "moevement"

    def __init__(
        self,
        table: OperatorTable,
        kind: WindowKind = WindowKind.ALIGNED,
        size: int | None = None,
        ordering: OrderingConfig | None = None,
        thresholds: ReorderThresholds | None = None,
    ) -> None:
        super().__init__(table)
        self.kind, self.size = kind, size
        self.popularity = Popularity(table, ordering or OrderingConfig())
        self.trigger = ReorderTrigger(table, thresholds or ReorderThresholds())
        self.counts = self.popularity.config.ordering
        self.settled = size is not None

    def first(self, start: int, most: int) -> SparseSchedule:
        """One window comes before ``start``, which holds the state that the run begins from."""
        size = min(self.size or FIRST_WINDOW, most)
        return self._schedule(self.popularity.order(), size).starting_at(start - size)

    def observe(self, counts: Scores) -> None:
        """Add to the popularity of the experts."""
        self.popularity.observe(counts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """What was asked for, or the smallest W whose heaviest slot is copied and sent while an iteration runs."""
        if self.size is not None:
            return (self.size,)
        budget = Budget(
            measured.iteration_s, measured.d2h_bytes_per_s, measured.replication_bytes_per_s, measured.replicas
        )
        return (choose_window(self.table, self._order(now), budget, self.kind).size,)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Another order where enough experts have changed, and the window asked for; or the order alone."""
        size = now.size if sizes is None else sizes[0]
        order, reorders = self._order(now), self._reorders()
        schedules = [self._schedule(order, size), self._schedule(order, now.size)]
        return Proposal(schedules, is_change=reorders or size != now.size, reorders=reorders)

    def accept(self, proposal: Proposal) -> None:
        """Compare with the popularity of now, from here on."""
        if proposal.reorders:
            self.trigger.ordered(self.popularity.scores)

    def learned(self) -> tuple[Scores, Scores | None]:
        """Popularity, and that which the order in force was made from."""
        return self.popularity.scores, self.trigger.reference

    def adopt(self, learned: Any) -> None:
        """Both of them."""
        self.popularity.scores, self.trigger.reference = learned

    def _reorders(self) -> bool:
        return self.trigger.should_reorder(self.popularity.scores)

    def _order(self, now: Schedule) -> Order:
        assert isinstance(now, SparseSchedule)
        return self.popularity.order() if self._reorders() else now.order

    def _schedule(self, order: Order, size: int) -> SparseSchedule:
        return SparseSchedule(self.table, order, impose_window(self.table, order, size, self.kind))
