"""Trainings of several strategies at several failure rates, many seeds of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moevement_core.simulator.failures import Failure
from moevement_core.simulator.strategies import STRATEGIES, Costs, Strategy
from moevement_core.simulator.training import Outcome, Spares, train
from moevement_core.simulator.workers import shared

CONFIDENCE = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Standard errors on each side of a mean in which it is with a probability of 95%, by Student, for 2 to 11 values."""
OF_MANY = 1.96
"""Likewise, of more."""


def half_interval(values: Sequence[float]) -> float:
    """Returns half of the 95% confidence interval of the mean; NaN of fewer than two values."""
    if len(values) < 2:
        return math.nan
    errors = CONFIDENCE[len(values) - 2] if len(values) - 2 < len(CONFIDENCE) else OF_MANY
    return errors * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Cell:
    """One strategy at one failure rate, over all seeds."""

    job: str
    ranks: int
    strategy: Strategy
    mtbf_s: float
    outcomes: tuple[Outcome, ...]
    together: float = 0.0
    """Probability that a failure took the next node along."""

    @property
    def ettr(self) -> float:
        """Mean of the trainings."""
        return statistics.fmean(one.ettr for one in self.outcomes)

    @property
    def interval(self) -> float:
        """Half of the 95% confidence interval of the mean."""
        return half_interval([one.ettr for one in self.outcomes])

    @property
    def formula(self) -> float:
        """The analytical ratio."""
        return self.strategy.analytic_ettr(self.mtbf_s)

    @property
    def loses(self) -> float:
        """Updates that no checkpoint had, in iterations, mean of the trainings."""
        return statistics.fmean(one.tokens_lost for one in self.outcomes)

    @property
    def lost(self) -> dict[str, float]:
        """Share of wall time by what it went to, the largest first."""
        wall_s = sum(one.wall_s for one in self.outcomes)
        shares = {name: sum(one.lost_s[name] for one in self.outcomes) / wall_s for name in self.outcomes[0].lost_s}
        return dict(sorted(shares.items(), key=lambda one: -one[1]))


@dataclass(frozen=True)
class Draws:
    """Failures at one rate: those of each training."""

    mtbf_s: float
    failures: tuple[list[Failure], ...]
    together: float = 0.0
    """Probability that a failure takes the next node along."""


def run(
    costs: Costs, strategies: Sequence[str], draws: Sequence[Draws], until_s: float, spares: Spares, workers: int = 1
) -> list[Cell]:
    """Every strategy at every rate.

    Args:
        costs: of the job.
        strategies: names.
        draws: by rate.
        until_s: wall seconds of a training.
        spares: of a training.
        workers: processes that share the trainings. One training of hours is a matter of milliseconds, so more than one
            pays from thousands of them on.

    Raises:
        ProcessGroupError: one of them has ended.
    """
    tasks = [(costs, name, one, until_s, spares) for one in draws for name in strategies]
    if workers == 1:
        return [_cell(*task) for task in tasks]
    return shared(_in_worker, tasks, min(workers, len(tasks)))


def _in_worker(task: tuple[Costs, str, Draws, float, Spares]) -> Cell:
    return _cell(*task)


def _cell(costs: Costs, name: str, draws: Draws, until_s: float, spares: Spares) -> Cell:
    return cell_of(STRATEGIES[name](costs, draws.mtbf_s), draws, until_s, spares)


def cell_of(strategy: Strategy, draws: Draws, until_s: float, spares: Spares) -> Cell:
    """Return the trainings of one strategy with each of the drawn failures."""
    job = strategy.costs.plan.given.job
    # A strategy may change in a training: each has its own.
    outcomes = tuple(train(strategy.fresh(), failures, until_s, spares) for failures in draws.failures)
    return Cell(job.name, job.ranks, strategy, draws.mtbf_s, outcomes, draws.together)
