"""Value of fault tolerance for a job: what a month costs it, beside what restarts from storage cost.

Everything is in GPU hours of a month: what saving, failures and recoveries take from the job's own GPUs, and the hours
of nodes that stand idle as spares. Both sides are simulated with the same failures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moevement_core.simulator.advice import SCALES, Choice, Variants, choices_of, fits
from moevement_core.simulator.experiment import Cell, Draws, cell_of, half_interval
from moevement_core.simulator.strategies import CheckFreq, Costs, DenseSynchronous
from moevement_core.simulator.strategies.base import Strategy
from moevement_core.simulator.training import Spares

MONTH_H = 720.0
MOST_SPARES = 8
STEP = 1.5
LEAST_SHARE = 0.005
"""Share of the job's GPU hours that has to be saved for another way to checkpoint to be worth the effort."""
SHORTEST_S, LONGEST_S = 60.0, 1e9
"""Mean times between failures among which the one is searched at which both sides cost the same."""
SAVING = ("checkpointing",)
FAILING = ("interrupted", "detect", "no spare", "regroup", "fetch", "convert", "catch up")


@dataclass(frozen=True)
class Way:
    """A way to checkpoint, with what a month of it costs."""

    name: str
    cell: Cell
    spares: int
    """Nodes that stand idle."""
    is_yours: bool = False
    """True if the user has given the interval."""

    @property
    def strategy(self) -> Strategy:
        """The strategy, with window or interval."""
        return self.cell.strategy

    @property
    def gpus(self) -> int:
        """GPUs of the job, spares left out."""
        return self.cell.ranks

    @property
    def saving_h(self) -> float:
        """GPU hours that saving takes from training."""
        return self._hours(SAVING)

    @property
    def failing_h(self) -> float:
        """GPU hours that failures take: iterations that are cut off or repeated, and recoveries."""
        return self._hours(FAILING)

    @property
    def spares_h(self) -> float:
        """GPU hours of idle spares."""
        return self.spares * self.strategy.costs.plan.given.cluster.gpus_per_node * MONTH_H

    @property
    def total_h(self) -> float:
        """GPU hours that are lost in all."""
        return statistics.fmean(self.totals_h)

    @property
    def totals_h(self) -> list[float]:
        """The same of each training."""
        return [(1 - one.ettr) * self.gpus * MONTH_H + self.spares_h for one in self.cell.outcomes]

    def _hours(self, parts: Sequence[str]) -> float:
        return sum(self.cell.lost[part] for part in parts) * self.gpus * MONTH_H


@dataclass(frozen=True)
class Worth:
    """Cost of a month of a job, today and with each strategy."""

    mtbf_s: float
    today: tuple[Way, ...]
    """Restarts from storage: at the best interval of each way to save, and at the user's; the cheapest first."""
    ours: tuple[Way, ...]
    """Strategies, each at its best: those that fit into host memory first, then the cheapest."""
    break_even_s: float
    """Longest mean time between failures at which ours pays; 0: it never does, inf: it always does."""

    @property
    def saved_h(self) -> float:
        """GPU hours that the cheapest of ours saves in a month over the cheapest of today's."""
        return self.today[0].total_h - self.ours[0].total_h

    @property
    def saved_interval_h(self) -> float:
        """Half of the 95% confidence interval of that: pairs of months with the same failures."""
        pairs = zip(self.today[0].totals_h, self.ours[0].totals_h, strict=True)
        return half_interval([today - ours for today, ours in pairs])

    @property
    def pays(self) -> bool:
        """True if the saving is worth the effort."""
        return fits(self.ours[0].strategy) and self.saved_h > LEAST_SHARE * self.today[0].gpus * MONTH_H

    @property
    def yours(self) -> Way | None:
        """The cheapest of today's ways at the user's interval; None if none was given."""
        return next((way for way in self.today if way.is_yours), None)


def worth(
    costs: Costs, draws: Draws, *, restart_s: float, every: int | None, spares: int | None, repair_s: float
) -> Worth:
    """Compare restarts from storage with every strategy.

    Args:
        costs: of the job with fault tolerance.
        draws: failures of each month.
        restart_s: from a failure to a job that has started again and loads its checkpoint, today; and until a job that
            waits for a node gets one.
        every: iterations between two checkpoints, today; left out only the best interval is looked at.
        spares: nodes that stand idle; left out the number that costs least.
        repair_s: after which a failed node is a spare again.
    """
    today = [
        Way(name, cell_of(strategy, draws, MONTH_H * 3600, Spares()), 0, is_yours)
        for name, strategy, is_yours in _today(replace(costs, detect_s=0.0, regroup_s=restart_s), draws.mtbf_s, every)
    ]
    today.sort(key=lambda way: way.total_h)
    tried = range(MOST_SPARES + 1) if spares is None else (spares,)
    pool = Spares(None, repair_s, restart_s)
    ours = _ours(costs, draws, tried, pool)
    return Worth(draws.mtbf_s, tuple(today), tuple(ours), _break_even_s(ours[0].strategy, tried, pool, costs))


def _today(costs: Costs, mtbf_s: float, every: int | None) -> Iterator[tuple[str, Strategy, bool]]:
    """Yield restarts from storage, saved while training waits or behind it, and whether the interval is the user's."""
    for name, of_interval, own in _stored(costs, mtbf_s):
        yield name, _best(of_interval, own, mtbf_s), False
        if every is not None:
            yield f"{name}, yours", of_interval(every), True


def _stored(costs: Costs, mtbf_s: float) -> Iterator[tuple[str, Callable[[int], Strategy], int]]:
    """Yield name, strategy of an interval, and an interval to begin with."""
    written = costs.iterations(max(costs.copy_s(costs.full_bytes), costs.store_s()))
    yield (
        "synchronous saves",
        lambda interval: DenseSynchronous(costs, mtbf_s, interval=interval),
        DenseSynchronous(costs, mtbf_s).interval,
    )
    yield (
        "asynchronous saves",
        lambda interval: CheckFreq(costs, interval=max(interval, written)),
        max(1, written),
    )


def _best(of_interval: Callable[[int], Strategy], own: int, mtbf_s: float) -> Strategy:
    intervals = {max(1, round(own * scale)) for scale in (*SCALES, 8.0, 16.0, 64.0)}
    return max((of_interval(one) for one in sorted(intervals)), key=lambda one: one.analytic_ettr(mtbf_s))


def _ours(costs: Costs, draws: Draws, tried: Sequence[int], spares: Spares) -> list[Way]:
    """Return each strategy at its best, with the number of spares that costs least, more being tried while it pays."""
    variants = Variants(costs)
    best: list[Way] = []
    for count in tried:
        choices = choices_of(variants, draws, MONTH_H * 3600, replace(spares, count=count))
        ways = [_way(choice, count) for choice in choices if not isinstance(choice.strategy, DenseSynchronous)]
        ways.sort(key=lambda way: (not fits(way.strategy), way.total_h))
        if best and ways[0].total_h >= best[0].total_h:
            break
        best = ways
    return best


def _way(choice: Choice, spares: int) -> Way:
    return Way(choice.flags, choice.cell, spares)


def _break_even_s(ours: Strategy, tried: Sequence[int], pool: Spares, costs: Costs) -> float:
    """Return the longest mean time between failures at which ``ours`` pays, by the formula."""

    def gain(mtbf_s: float) -> float:
        lost = min(lost_share(ours, mtbf_s, replace(pool, count=count)) for count in tried)
        return lost_today(costs, mtbf_s, pool.provided_s) - lost - LEAST_SHARE

    # Where failures come faster than a job can start, both sides lose everything: the search begins at the other end.
    low, high = LONGEST_S, math.inf
    while gain(low) <= 0:
        low, high = low / STEP, low
        if low < SHORTEST_S:
            return 0.0
    if high == math.inf:
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def lost_today(costs: Costs, mtbf_s: float, restart_s: float, every: int | None = None) -> float:
    """Return what restarts from storage lose by the formula, at the best interval or at ``every``, as a share."""
    restarted = replace(costs, detect_s=0.0, regroup_s=restart_s)
    stored = (
        of_interval(every) if every is not None else _best(of_interval, own, mtbf_s)
        for _, of_interval, own in _stored(restarted, mtbf_s)
    )
    return min(1 - one.analytic_ettr(mtbf_s) for one in stored)


def lost_share(strategy: Strategy, mtbf_s: float, pool: Spares) -> float:
    """Return what is lost by the formula, idle spares included, as a share of the job's GPU hours.

    A failure that finds all spares under repair waits until the scheduler gives a node; Erlang's loss formula says how
    many do.
    """
    costs, given, spares = strategy.costs, strategy.costs.plan.given, pool.count or 0
    without = 1.0
    for count in range(1, spares + 1):
        load = pool.repair_s / mtbf_s * without
        without = load / (count + load) if math.isfinite(load) else 1.0
    recovery_s = strategy.expected_recovery_s() + without * min(pool.provided_s, pool.repair_s)
    ettr = 1 / (1 + strategy.overhead_s / costs.iteration_s) / (1 + recovery_s / mtbf_s)
    return 1 - ettr + spares * given.cluster.gpus_per_node / given.job.ranks
