"""Simulation of nodes that fail one by one, as in Lazarus's figures 6 and 7. :mod:`benchmarks.elastic` prints the tables.

A random node fails every 5 minutes or every 40 minutes, until half of the ten nodes are left. No node joins. All systems
lose the same nodes. Results are means over :data:`ORDERS` orders of nodes; the paper has one.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.lazarus_testbed import MODELS, NODES, RECORD_EVERY, SAMPLES_OF_NODE, Tokens, job_of, loads_of
from moevement_core.simulator.availability import Change
from moevement_core.simulator.elastic import ElasticJob, ElasticTraining, System, TrainedElastically

ORDERS = 10
LOST = NODES // 2
LONG_RESTART_S = 240.0
"""Seconds of a restart, instead of 120, for one column: how much the comparison depends on this assumption."""
HEADER = (
    "figure", "model", "system", "steps", "samples", "Lazarus over it", "published", "if a restart takes "
    f"{LONG_RESTART_S:.0f} s", "restarts", "regrouping, s", "migrating, s", "restarting, s", "checkpoints, s",
)  # fmt: skip
NODES_HEADER = ("figure", "model", "system", *(f"{NODES - lost} nodes" for lost in range(LOST + 1)))


class Setting(NamedTuple):
    """Setting of one figure."""

    between_s: float
    """Seconds from one failure to the next; training begins and ends with a period of this length."""
    every: float
    """Multiple of the baselines' checkpoint intervals."""


SETTINGS = {6: Setting(300.0, 1.0), 7: Setting(2400.0, 4.0)}
PUBLISHED = {
    (6, "GPT-S", System.RESTART): "2.8x", (6, "GPT-S", System.REGROUP): "1.4x", (6, "GPT-L", System.RESTART): "5.7x",
    (6, "GPT-L", System.REGROUP): "2.8x", (7, "GPT-S", System.RESTART): "1.6x", (7, "GPT-L", System.RESTART): "2.3x",
    (7, "GPT-S", System.REGROUP): "near DS", (7, "GPT-L", System.REGROUP): "near DS",
}  # fmt: skip
"""Samples of Lazarus over those of a baseline (section 6.2)."""


class Failing(NamedTuple):
    """Result of one system on nodes that fail one by one, over all orders."""

    trained: list[TrainedElastically]
    rates: list[list[float]]
    """Samples per second in each period between two failures, for each order.

    Samples that a failure loses count against the period that begins with the failure.
    """

    @property
    def batches(self) -> float:
        """Committed samples, in batches of the whole cluster, as a mean over orders."""
        return statistics.mean(trained.batches for trained in self.trained)


def orders() -> list[list[str]]:
    """Return the nodes that fail, in the order of their failures, for each simulated training."""
    return [random.Random(seed).sample(node_names(), LOST) for seed in range(ORDERS)]


def node_names() -> list[str]:
    """Return the names of the cluster's nodes."""
    return [f"n{number}" for number in range(NODES)]


def fail_one_by_one(
    job: ElasticJob, system: System, loads: Tokens, lost: Sequence[str], *, between_s: float
) -> tuple[TrainedElastically, list[float]]:
    """Simulate a training that loses a node after each period, and return the result with the rate of each period.

    Args:
        job: job to simulate.
        system: system that trains it.
        loads: tokens of each expert, ``[records, layers, E]``.
        lost: nodes that fail, in this order.
        between_s: seconds of a period.

    Returns:
        The result, and the committed samples per second in each period.
    """
    training = ElasticTraining(job, system, loads, every=RECORD_EVERY, first=node_names())
    rates, before = [], 0.0
    for failures in ([], *([Change(0.0, removed=frozenset({node}))] for node in lost)):
        training.run(failures, between_s)
        rates.append((training.done.batches - before) * NODES * SAMPLES_OF_NODE / between_s)
        before = training.done.batches
    return training.done, rates


def simulate(figure: int, model: str, system: System, tokens: Tokens, *, restart_s: float | None = None) -> Failing:
    """Simulate a system in the setting of a figure, with every order of failures.

    Args:
        figure: number of the figure, 6 or 7.
        model: name of the model.
        system: system that trains it.
        tokens: recorded loads, ``[records, layers, experts]``.
        restart_s: seconds of a restart. None: the job's own.
    """
    setting, loads = SETTINGS[figure], loads_of(model, tokens)
    job = job_of(model, system, every=setting.every, saves=False)
    job = job if restart_s is None else replace(job, restart_s=restart_s)
    results = [fail_one_by_one(job, system, loads, lost, between_s=setting.between_s) for lost in orders()]
    return Failing([trained for trained, _ in results], [rates for _, rates in results])


def failure_rows(tokens: Tokens) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of both figures: trained samples, and samples per second by number of live nodes."""
    totals, rates = [], []
    for figure in SETTINGS:
        for model in MODELS:
            results = {system: simulate(figure, model, system, tokens) for system in System}
            slow = results | {
                system: simulate(figure, model, system, tokens, restart_s=LONG_RESTART_S)
                for system in (System.REGROUP, System.RESTART)
            }
            for system, result in results.items():
                totals.append([str(figure), model, str(system), *_totals(figure, model, results, slow, system)])
                of_periods = (statistics.mean(period) for period in zip(*result.rates, strict=True))
                rates.append([str(figure), model, str(system), *(f"{rate:.1f}" for rate in of_periods)])
    return totals, rates


def _totals(
    figure: int, model: str, results: dict[System, Failing], slow: dict[System, Failing], system: System
) -> list[str]:
    result = results[system]

    def over(of: dict[System, Failing]) -> str:
        return f"{of[System.LAZARUS].batches / of[system].batches:.1f}x"

    return [
        f"{statistics.mean(trained.iterations for trained in result.trained):,.0f}",
        f"{result.batches * NODES * SAMPLES_OF_NODE:,.0f}",
        over(results), PUBLISHED.get((figure, model, system), ""), over(slow),
        f"{statistics.mean(trained.fallbacks for trained in result.trained):.1f}",
        *(f"{statistics.mean(trained.lost_s[what] for trained in result.trained):.0f}"
          for what in ("regroup", "migrate", "restart", "checkpoint")),
    ]  # fmt: skip
