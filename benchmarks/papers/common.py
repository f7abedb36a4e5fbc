"""Helpers of the scripts in this folder: jobs at stated and implied bandwidths, simulated trainings, tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.published import HOURS, MODELS
from moevement_cli.simulate import SCENARIOS
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.simulator.costs import STRATEGIES, Costs, GeminiCost, StrategyCost
from moevement_core.simulator.failures import FailureModel
from moevement_core.simulator.scenario import Scenario, load
from moevement_core.simulator.training import train

SEEDS = 20
Draw = Callable[[Any], None]
"""Function that draws a figure on matplotlib axes."""
SYSTEMS = {**STRATEGIES, "gemini": STRATEGIES["gemini-stalling"]}
"""Strategies by name. Gemini is as in MoEvement's measurements: each checkpoint overlaps with one iteration only."""


def scenario(preset: str) -> Scenario:
    """Return the scenario of a model, with copies at the whole bandwidth that the paper states."""
    loaded = load(SCENARIOS / f"{preset}.yaml")
    return replace(loaded, cluster=replace(loaded.cluster, network_share=1.0))


def gemini(costs: Costs, mtbf_s: float, interval: int | None = None) -> GeminiCost:
    """Return GEMINI as in :data:`SYSTEMS`, at its best interval or at ``interval``."""
    return GeminiCost(costs, mtbf_s, interval=interval, is_spread=False)


def implied_bandwidth(costs: Costs, checkpoint_s: float) -> float:
    """Return the bytes per second, summed over all ranks, at which a dense checkpoint takes ``checkpoint_s`` seconds.

    The heaviest rank ends last, so the function counts its bytes for every rank.
    """
    return costs.full_bytes * costs.plan.inputs.job.ranks / checkpoint_s


def at_bandwidth(costs: Costs, bytes_per_s: float) -> Costs:
    """Return the costs of the job if copies to the host and copies to peers both have this bandwidth.

    Args:
        costs: costs of the job.
        bytes_per_s: bandwidth of all ranks together, in bytes per second.
    """
    inputs = costs.plan.inputs
    rank_bytes_per_s = bytes_per_s / inputs.job.ranks
    cluster = replace(
        inputs.cluster,
        d2h_bytes_per_s=rank_bytes_per_s,
        network_bytes_per_s=rank_bytes_per_s * inputs.cluster.gpus_per_node * max(1, inputs.replicas),
    )
    # The papers do not say how logs affect the bandwidth, so the job has no logs.
    job = replace(inputs.job, boundary_bytes=0)
    return replace(costs, plan=CheckpointPlan(replace(inputs, cluster=cluster, job=job)))


def simulated(strategy: StrategyCost, mtbf_s: float, hours: float = HOURS) -> float:
    """Return the mean ETTR of simulated trainings."""
    model = FailureModel(mtbf_s, strategy.costs.plan.inputs.nodes)
    return statistics.fmean(train(strategy, model.draw(hours * 3600, seed), hours * 3600).ettr for seed in range(SEEDS))


def formula(overhead: float, recovery_s: float, mtbf_s: float) -> float:
    """Return the ETTR by the formula of MoEvement, section 2.4."""
    return 1 / (1 + overhead) / (1 + recovery_s / mtbf_s)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def names() -> tuple[str, ...]:
    """Return the names of the models of table 3."""
    return tuple(model.preset for model in MODELS)
