"""Experiments: trainings of several strategies at several failure rates, with many seeds each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moevement_core.simulator.costs import STRATEGIES, Costs, StrategyCost
from moevement_core.simulator.failures import Failure
from moevement_core.simulator.training import Spares, TrainingOutcome, train
from moevement_core.simulator.workers import shared

CONFIDENCE = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Half of the 95% confidence interval of a mean of 2, 3, ... 11 values, in standard errors (Student's t)."""
OF_MANY = 1.96
"""Half of the 95% confidence interval of a mean of 12 or more values, in standard errors."""


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95% confidence interval of the mean of ``values``; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    errors = CONFIDENCE[len(values) - 2] if len(values) - 2 < len(CONFIDENCE) else OF_MANY
    return errors * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Cell:
    """Results of one strategy at one failure rate, over all seeds."""

    job: str
    ranks: int
    strategy: StrategyCost
    mtbf_s: float
    outcomes: tuple[TrainingOutcome, ...]
    together: float = 0.0
    """Probability that a failure of a node also takes the node with the next number, 0 to 1."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio, a mean over the trainings."""
        return statistics.fmean(outcome.ettr for outcome in self.outcomes)

    @property
    def interval(self) -> float:
        """Half of the 95% confidence interval of the mean ETTR."""
        return half_interval([outcome.ettr for outcome in self.outcomes])

    @property
    def formula(self) -> float:
        """Effective training time ratio by the formula of MoEvement, section 2.4."""
        return self.strategy.analytic_ettr(self.mtbf_s)

    @property
    def loses(self) -> float:
        """Mean updates of experts, in iterations, that a training loses because no checkpoint has them."""
        return statistics.fmean(outcome.tokens_lost for outcome in self.outcomes)

    @property
    def lost(self) -> dict[str, float]:
        """Share of wall time that the trainings lose to each part of saving and recovery, the largest share first."""
        wall_s = sum(outcome.wall_s for outcome in self.outcomes)
        shares = {
            name: sum(outcome.lost_s[name] for outcome in self.outcomes) / wall_s for name in self.outcomes[0].lost_s
        }
        return dict(sorted(shares.items(), key=lambda part: -part[1]))


@dataclass(frozen=True)
class Draws:
    """Failures at one rate, random or from a trace: one list for each simulated training."""

    mtbf_s: float
    failures: tuple[list[Failure], ...]
    together: float = 0.0
    """Probability that a failure of a node also takes the node with the next number, 0 to 1."""


def run(
    costs: Costs, strategies: Sequence[str], draws: Sequence[Draws], until_s: float, spares: Spares, workers: int = 1
) -> list[Cell]:
    """Simulate every strategy at every failure rate.

    Args:
        costs: costs of the job.
        strategies: names of strategies.
        draws: failures at each rate.
        until_s: wall seconds of a training.
        spares: spare nodes of a training.
        workers: processes that share the trainings. A training takes milliseconds, so several processes pay off only
            for thousands of trainings.

    Returns:
        Results in the order of ``draws``, and for each rate in the order of ``strategies``.

    Raises:
        ProcessGroupError: a worker process has ended.
    """
    tasks = [(costs, name, rate, until_s, spares) for rate in draws for name in strategies]
    if workers == 1:
        return [_cell(*task) for task in tasks]
    return shared(_in_worker, tasks, min(workers, len(tasks)))


def _in_worker(task: tuple[Costs, str, Draws, float, Spares]) -> Cell:
    return _cell(*task)


def _cell(costs: Costs, name: str, draws: Draws, until_s: float, spares: Spares) -> Cell:
    return cell_of(STRATEGIES[name](costs, draws.mtbf_s), draws, until_s, spares)


def cell_of(strategy: StrategyCost, draws: Draws, until_s: float, spares: Spares) -> Cell:
    """Simulate one training with each list of failures in ``draws``, and return the results of the strategy."""
    job = strategy.costs.plan.inputs.job
    outcomes = tuple(train(strategy, failures, until_s, spares) for failures in draws.failures)
    return Cell(
        job=job.name,
        ranks=job.ranks,
        strategy=strategy,
        mtbf_s=draws.mtbf_s,
        outcomes=outcomes,
        together=draws.together,
    )
