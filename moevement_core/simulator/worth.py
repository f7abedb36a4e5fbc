"""Worth of fault tolerance for a job: its monthly cost, compared with the cost of restarts from storage.

All costs are GPU hours of a month: those that saving, failures and recoveries take from the job's own GPUs, and those
of idle spare nodes. Both sides are simulated with the same failures.
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
"""Least share of the job's GPU hours that another way to checkpoint has to save to be worth the effort."""
SHORTEST_S, LONGEST_S = 60.0, 1e9
"""Shortest and longest mean seconds between failures among which the break-even is searched."""
SAVING = ("checkpointing",)
FAILING = ("interrupted", "detect", "no spare", "regroup", "fetch", "convert", "catch up")


@dataclass(frozen=True)
class Way:
    """Way to checkpoint, with its cost in a month."""

    name: str
    cell: Cell
    spares: int
    """Number of idle spare nodes."""
    has_user_interval: bool = False
    """True if the user has given its interval."""

    @property
    def strategy(self) -> Strategy:
        """Strategy of this way, with its window or interval."""
        return self.cell.strategy

    @property
    def gpus(self) -> int:
        """Number of GPUs of the job, without spares."""
        return self.cell.ranks

    @property
    def saving_h(self) -> float:
        """GPU hours that saving takes from training."""
        return self._hours(SAVING)

    @property
    def failing_h(self) -> float:
        """GPU hours that failures take: interrupted or repeated iterations, and recoveries."""
        return self._hours(FAILING)

    @property
    def spares_h(self) -> float:
        """GPU hours of idle spares."""
        return self.spares * self.strategy.costs.plan.inputs.cluster.gpus_per_node * MONTH_H

    @property
    def total_h(self) -> float:
        """GPU hours lost in all, a mean over the trainings."""
        return statistics.fmean(self.totals_h)

    @property
    def totals_h(self) -> list[float]:
        """GPU hours lost in all, for each training."""
        return [(1 - outcome.ettr) * self.gpus * MONTH_H + self.spares_h for outcome in self.cell.outcomes]

    def _hours(self, parts: Sequence[str]) -> float:
        return sum(self.cell.lost[part] for part in parts) * self.gpus * MONTH_H


@dataclass(frozen=True)
class Worth:
    """Monthly cost of a job, today and with each strategy."""

    mtbf_s: float
    today: tuple[Way, ...]
    """Restarts from storage, at the best interval of each way to save and at the user's; the cheapest first."""
    strategies: tuple[Way, ...]
    """Strategies at their best, the cheapest first; those that fit into host memory precede others."""
    break_even_s: float
    """Longest mean seconds between failures at which the best strategy pays; 0 if never, inf if always."""

    @property
    def saved_h(self) -> float:
        """GPU hours that the best strategy saves in a month over the cheapest restarts from storage."""
        return self.today[0].total_h - self.strategies[0].total_h

    @property
    def saved_interval_h(self) -> float:
        """Half of the 95% confidence interval of the saved hours, from pairs of months with the same failures."""
        pairs = zip(self.today[0].totals_h, self.strategies[0].totals_h, strict=True)
        return half_interval([today - best for today, best in pairs])

    @property
    def pays(self) -> bool:
        """True if the best strategy fits into host memory and saves enough to be worth the effort."""
        return fits(self.strategies[0].strategy) and self.saved_h > LEAST_SHARE * self.today[0].gpus * MONTH_H

    @property
    def at_user_interval(self) -> Way | None:
        """Cheapest of today's ways at the user's interval; None if no interval was given."""
        return next((way for way in self.today if way.has_user_interval), None)


def worth(
    costs: Costs, draws: Draws, *, restart_s: float, every: int | None, spares: int | None, repair_s: float
) -> Worth:
    """Compare restarts from storage with every strategy.

    Args:
        costs: costs of the job with fault tolerance.
        draws: failures of each month.
        restart_s: seconds from a failure until a job has started again and loads its checkpoint, today. A job that
            waits for a node also gets one after so many seconds.
        every: iterations between two checkpoints, today; left out, only the best interval is examined.
        spares: number of idle spare nodes; left out, the number that costs least.
        repair_s: seconds after which a failed node is a spare again.
    """
    today = [
        Way(name, cell_of(strategy, draws, MONTH_H * 3600, Spares()), 0, has_user_interval)
        for name, strategy, has_user_interval in _today(
            replace(costs, detect_s=0.0, regroup_s=restart_s), draws.mtbf_s, every
        )
    ]
    today.sort(key=lambda way: way.total_h)
    tried = range(MOST_SPARES + 1) if spares is None else (spares,)
    pool = Spares(None, repair_s, restart_s)
    tolerant = _ours(costs, draws, tried, pool)
    return Worth(draws.mtbf_s, tuple(today), tuple(tolerant), _break_even_s(tolerant[0].strategy, tried, pool, costs))


def _today(costs: Costs, mtbf_s: float, every: int | None) -> Iterator[tuple[str, Strategy, bool]]:
    """Yield name and strategy of restarts from storage, and True if the interval is the user's.

    Saves are synchronous, so that training waits, or asynchronous.
    """
    for name, of_interval, own in _stored(costs, mtbf_s):
        yield name, _best(of_interval, own, mtbf_s), False
        if every is not None:
            yield f"{name}, yours", of_interval(every), True


def _stored(costs: Costs, mtbf_s: float) -> Iterator[tuple[str, Callable[[int], Strategy], int]]:
    """Yield the name of a way to save, its strategy by interval, and an interval to begin with."""
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
    return max(
        (of_interval(interval) for interval in sorted(intervals)), key=lambda strategy: strategy.analytic_ettr(mtbf_s)
    )


def _ours(costs: Costs, draws: Draws, tried: Sequence[int], spares: Spares) -> list[Way]:
    """Return each strategy at its best, with the number of spares that costs least.

    More spares are tried as long as the cheapest strategy gets cheaper.
    """
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


def _break_even_s(strategy: Strategy, tried: Sequence[int], pool: Spares, costs: Costs) -> float:
    """Return the longest mean seconds between failures at which ``strategy`` pays, by the formula."""

    def gain(mtbf_s: float) -> float:
        lost = min(lost_share(strategy, mtbf_s, replace(pool, count=count)) for count in tried)
        return lost_today(costs, mtbf_s, pool.provided_s) - lost - LEAST_SHARE

    # The search begins with rare failures: both sides lose everything if failures are faster than restarts.
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
    """Return the share of GPU hours that restarts from storage lose, by the formula.

    The interval is ``every``, or the best one if that is None.
    """
    restarted = replace(costs, detect_s=0.0, regroup_s=restart_s)
    stored = (
        of_interval(every) if every is not None else _best(of_interval, own, mtbf_s)
        for _, of_interval, own in _stored(restarted, mtbf_s)
    )
    return min(1 - strategy.analytic_ettr(mtbf_s) for strategy in stored)


def lost_share(strategy: Strategy, mtbf_s: float, pool: Spares) -> float:
    """Return the share of the job's GPU hours that a strategy loses by the formula, idle spares included.

    A failure that finds all spares under repair waits until the scheduler provides a node. Erlang's loss formula gives
    the share of such failures.
    """
    costs, inputs, spares = strategy.costs, strategy.costs.plan.inputs, pool.count or 0
    without = 1.0
    for count in range(1, spares + 1):
        load = pool.repair_s / mtbf_s * without
        without = load / (count + load) if math.isfinite(load) else 1.0
    recovery_s = strategy.expected_recovery_s() + without * min(pool.provided_s, pool.repair_s)
    ettr = 1 / (1 + strategy.overhead_s / costs.iteration_s) / (1 + recovery_s / mtbf_s)
    return 1 - ettr + spares * inputs.cluster.gpus_per_node / inputs.job.ranks
