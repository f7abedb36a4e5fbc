"""Common parts of the scripts of this folder: jobs at stated and at implied bandwidths, trainings, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.papers.published import HOURS, MODELS
from moevement_cli.simulate import SCENARIOS
from moevement_core.checkpoint_plan import CheckpointPlan
from moevement_core.simulator.failures import FailureModel
from moevement_core.simulator.scenario import Scenario, load
from moevement_core.simulator.strategies import STRATEGIES, Costs, Gemini, Strategy
from moevement_core.simulator.training import train

SEEDS = 20
SYSTEMS = {**STRATEGIES, "gemini": STRATEGIES["gemini-stalling"]}
"""Strategies by name, GEMINI as MoEvement measured it: each checkpoint hides beside one iteration."""


def scenario(preset: str) -> Scenario:
    """Return the scenario of a model, with copies at the whole bandwidth that the paper states."""
    found = load(SCENARIOS / f"{preset}.yaml")
    return replace(found, cluster=replace(found.cluster, network_share=1.0))


def gemini(costs: Costs, mtbf_s: float, interval: int | None = None) -> Gemini:
    """Return that GEMINI at its best interval, or at one that is given."""
    return Gemini(costs, mtbf_s, interval=interval, is_spread=False)


def implied_bandwidth(costs: Costs, checkpoint_s: float) -> float:
    """Bytes per second of all ranks together, at which a dense checkpoint takes so long; the heaviest rank is the last."""
    return costs.full_bytes * costs.plan.given.job.ranks / checkpoint_s


def at_bandwidth(costs: Costs, bytes_per_s: float) -> Costs:
    """The same job with one bandwidth of all ranks together, for copies and for replication alike."""
    given = costs.plan.given
    each = bytes_per_s / given.job.ranks
    cluster = replace(
        given.cluster,
        d2h_bytes_per_s=each,
        network_bytes_per_s=each * given.cluster.gpus_per_node * max(1, given.replicas),
    )
    # Nothing is known of what logs do to it, so they are left out.
    job = replace(given.job, boundary_bytes=0)
    return replace(costs, plan=CheckpointPlan(replace(given, cluster=cluster, job=job)))


def simulated(strategy: Strategy, mtbf_s: float, hours: float = HOURS) -> float:
    """ETTR, mean of trainings."""
    model = FailureModel(mtbf_s, strategy.costs.nodes)
    return statistics.fmean(
        train(strategy.fresh(), model.draw(hours * 3600, seed), hours * 3600).ettr for seed in range(SEEDS)
    )


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
