"""Monthly cost of fault tolerance for a job, compared with the monthly cost of restarts from storage.

Costs are GPU hours in a month: hours that saving, failures and recoveries take from the job, and hours of idle spare
nodes. The module simulates the job with fault tolerance and with restarts from storage, under the same failures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moevement_core.simulator.advice import SCALES, Choice, Variants, choices_of, fits
from moevement_core.simulator.costs import CheckFreqCost, Costs, DenseSynchronousCost
from moevement_core.simulator.costs.strategy_cost import StrategyCost
from moevement_core.simulator.experiment import Cell, Draws, cell_of, half_interval
from moevement_core.simulator.training import Spares

MONTH_H = 720.0
MOST_SPARES = 8
STEP = 1.5
LEAST_SHARE = 0.005
"""Smallest share of the job's GPU hours for which a change of the strategy is worth the effort."""
SHORTEST_S, LONGEST_S = 60.0, 1e9
"""Shortest and longest mean seconds between failures in the search for :attr:`Worth.break_even_s`."""
SAVING = ("checkpointing",)
FAILING = ("interrupted", "detect", "no spare", "regroup", "fetch", "convert", "catch up")


@dataclass(frozen=True)
class Way:
    """Strategy with its settings and its cost in a month."""

    name: str
    cell: Cell
    spares: int
    """Number of spare nodes that the job keeps idle."""
    has_user_interval: bool = False
    """True if the user has given the interval between checkpoints."""

    @property
    def strategy(self) -> StrategyCost:
        """Simulated strategy, with its window or interval."""
        return self.cell.strategy

    @property
    def gpus(self) -> int:
        """Number of GPUs of the job, without spares."""
        return self.cell.ranks

    @property
    def saving_h(self) -> float:
        """GPU hours in a month that saving takes from training."""
        return self._hours(SAVING)

    @property
    def failing_h(self) -> float:
        """GPU hours in a month that failures take: interrupted or repeated iterations, and recoveries."""
        return self._hours(FAILING)

    @property
    def spares_h(self) -> float:
        """GPU hours of idle spare nodes in a month."""
        return self.spares * self.strategy.costs.plan.inputs.cluster.gpus_per_node * MONTH_H

    @property
    def total_h(self) -> float:
        """GPU hours that the job loses in a month, idle spares included; a mean over the simulated months."""
        return statistics.fmean(self.totals_h)

    @property
    def totals_h(self) -> list[float]:
        """GPU hours that the job loses in a month, idle spares included, for each simulated month."""
        return [(1 - outcome.ettr) * self.gpus * MONTH_H + self.spares_h for outcome in self.cell.outcomes]

    def _hours(self, parts: Sequence[str]) -> float:
        return sum(self.cell.lost[part] for part in parts) * self.gpus * MONTH_H


@dataclass(frozen=True)
class Worth:
    """Monthly cost of a job today, with restarts from storage, and with each strategy of this project."""

    mtbf_s: float
    today: tuple[Way, ...]
    """Ways to restart from storage, the cheapest first. Saves are synchronous or asynchronous, and the interval between
    them is the best one or the user's."""
    strategies: tuple[Way, ...]
    """Strategies of this project with their best settings, the cheapest first. Those that do not fit into host memory
    come last."""
    break_even_s: float
    """Longest mean seconds between failures at which the best strategy pays off.

    0 if it never pays off; infinite if it always does.
    """

    @property
    def saved_h(self) -> float:
        """GPU hours in a month that the best strategy saves, compared with the cheapest way to restart from storage."""
        return self.today[0].total_h - self.strategies[0].total_h

    @property
    def saved_interval_h(self) -> float:
        """Half of the 95% confidence interval of :attr:`saved_h`, from pairs of months with the same failures."""
        pairs = zip(self.today[0].totals_h, self.strategies[0].totals_h, strict=True)
        return half_interval([today - best for today, best in pairs])

    @property
    def pays(self) -> bool:
        """True if the best strategy fits into host memory and saves more than :data:`LEAST_SHARE` of the GPU hours."""
        return fits(self.strategies[0].strategy) and self.saved_h > LEAST_SHARE * self.today[0].gpus * MONTH_H

    @property
    def at_user_interval(self) -> Way | None:
        """Cheapest way to restart from storage with the user's interval; None if the user gave no interval."""
        return next((way for way in self.today if way.has_user_interval), None)


def worth(
    costs: Costs, draws: Draws, *, restart_s: float, every: int | None, spares: int | None, repair_s: float
) -> Worth:
    """Compare the monthly cost of restarts from storage with that of every strategy.

    Args:
        costs: costs of the job with the strategies of this project.
        draws: failures of each month.
        restart_s: seconds from a failure until a job without fault tolerance runs again and loads its checkpoint. A
            fault-tolerant job without a free spare waits for the same time until the scheduler provides a node.
        every: iterations between two checkpoints today; None to examine only the best interval.
        spares: number of idle spare nodes; None for the number that costs least.
        repair_s: seconds from a node's failure until it is repaired and serves as a spare.
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


def _today(costs: Costs, mtbf_s: float, every: int | None) -> Iterator[tuple[str, StrategyCost, bool]]:
    """Yield the ways to restart from storage: name, strategy, and True if the interval is the user's.

    Training waits for a synchronous save. It continues during an asynchronous save.
    """
    for name, of_interval, own in _stored(costs, mtbf_s):
        yield name, _best(of_interval, own, mtbf_s), False
        if every is not None:
            yield f"{name}, yours", of_interval(every), True


def _stored(costs: Costs, mtbf_s: float) -> Iterator[tuple[str, Callable[[int], StrategyCost], int]]:
    """Yield synchronous and asynchronous saves to storage.

    Each item has a name, a function from the interval to the strategy, and the interval around which :func:`_best`
    searches for the best one.
    """
    written = costs.iterations(max(costs.copy_s(costs.full_bytes), costs.store_s()))
    yield (
        "synchronous saves",
        lambda interval: DenseSynchronousCost(costs, mtbf_s, interval=interval),
        DenseSynchronousCost(costs, mtbf_s).interval,
    )
    yield (
        "asynchronous saves",
        lambda interval: CheckFreqCost(costs, interval=max(interval, written)),
        max(1, written),
    )


def _best(of_interval: Callable[[int], StrategyCost], own: int, mtbf_s: float) -> StrategyCost:
    intervals = {max(1, round(own * scale)) for scale in (*SCALES, 8.0, 16.0, 64.0)}
    return max(
        (of_interval(interval) for interval in sorted(intervals)), key=lambda strategy: strategy.analytic_ettr(mtbf_s)
    )


def _ours(costs: Costs, draws: Draws, tried: Sequence[int], spares: Spares) -> list[Way]:
    """Return each strategy with its best settings, all with the number of spares that costs least.

    The search goes through the numbers of spares in ``tried``. It ends when the next number of spares does not
    make the cheapest strategy cheaper.
    """
    variants = Variants(costs)
    best: list[Way] = []
    for count in tried:
        choices = choices_of(variants, draws, MONTH_H * 3600, replace(spares, count=count))
        ways = [_way(choice, count) for choice in choices if not isinstance(choice.strategy, DenseSynchronousCost)]
        ways.sort(key=lambda way: (not fits(way.strategy), way.total_h))
        if best and ways[0].total_h >= best[0].total_h:
            break
        best = ways
    return best


def _way(choice: Choice, spares: int) -> Way:
    return Way(choice.flags, choice.cell, spares)


def _break_even_s(strategy: StrategyCost, tried: Sequence[int], pool: Spares, costs: Costs) -> float:
    """Return the longest mean seconds between failures at which ``strategy`` pays off.

    It pays off if it saves more than :data:`LEAST_SHARE` of the GPU hours, by the ETTR formula.
    """

    def gain(mtbf_s: float) -> float:
        lost = min(lost_share(strategy, mtbf_s, replace(pool, count=count)) for count in tried)
        return lost_today(costs, mtbf_s, pool.provided_s) - lost - LEAST_SHARE

    # The search begins with rare failures. If failures come faster than restarts end, both ways lose all time.
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
    """Return the share of GPU hours that a job loses today, with the cheapest restarts from storage, by the formula.

    The formula is that of MoEvement, section 2.4.

    Args:
        costs: costs of the job with the strategies of this project.
        mtbf_s: mean seconds between failures of the job.
        restart_s: seconds from a failure until the job runs again and loads its checkpoint.
        every: iterations between two checkpoints; None for the best interval.
    """
    restarted = replace(costs, detect_s=0.0, regroup_s=restart_s)
    stored = (
        of_interval(every) if every is not None else _best(of_interval, own, mtbf_s)
        for _, of_interval, own in _stored(restarted, mtbf_s)
    )
    return min(1 - strategy.analytic_ettr(mtbf_s) for strategy in stored)


def lost_share(strategy: StrategyCost, mtbf_s: float, pool: Spares) -> float:
    """Return the share of the job's GPU hours that a strategy loses, idle spares included.

    The share comes from the formula of MoEvement, section 2.4. If all spares are under repair, the job waits until the
    scheduler provides a node or a spare is repaired. Erlang's loss formula gives the share of failures for which no
    spare is free.
    """
    costs, inputs, spares = strategy.costs, strategy.costs.plan.inputs, pool.count or 0
    without = 1.0
    for count in range(1, spares + 1):
        load = pool.repair_s / mtbf_s * without
        without = load / (count + load) if math.isfinite(load) else 1.0
    recovery_s = strategy.expected_recovery_s() + without * min(pool.provided_s, pool.repair_s)
    ettr = 1 / (1 + strategy.overhead_s / costs.iteration_s) / (1 + recovery_s / mtbf_s)
    return 1 - ettr + spares * inputs.cluster.gpus_per_node / inputs.job.ranks
