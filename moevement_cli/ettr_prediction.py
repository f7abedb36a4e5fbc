"""What the simulator says of the jobs of ``moevement bench ettr``, from a profile of the training.

What no profile has comes from the jobs of *other* strategies over the same links: how long a loss goes unnoticed, how
long ranks take to regroup, and how much copies to peers slow training down. How often state is saved is taken from the
jobs themselves. Predicted is what saving costs, how far a failure goes back, and how long what is run again takes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moevement_cli.ettr_samples import FREE, Sample, SavingCost, saving_costs
from moevement_core.replication.spread import LINK_SHARE
from moevement_core.simulator.failures import Failure
from moevement_core.simulator.scenario import Scenario
from moevement_core.simulator.strategies import (
    CheckFreq,
    Costs,
    DenseToPeers,
    Gemini,
    MoC,
    MoEtion,
    MoEvement,
    NoCheckpoints,
    Redo,
    Strategy,
)
from moevement_core.simulator.training import train

SIMULATED: dict[str, Callable[[Costs, float, int], Strategy]] = {
    "moevement": lambda costs, mtbf_s, interval: MoEvement(costs),
    "moevement-redo": lambda costs, mtbf_s, interval: Redo(costs),
    "moevement-auto": lambda costs, mtbf_s, interval: Redo(costs),
    "dense": lambda costs, mtbf_s, interval: DenseToPeers(costs, interval),
    "gemini": lambda costs, mtbf_s, interval: Gemini(costs, mtbf_s, interval=interval),
    "checkfreq": lambda costs, mtbf_s, interval: CheckFreq(costs, interval),
    "moc": lambda costs, mtbf_s, interval: MoC(costs),
    "moetion": lambda costs, mtbf_s, interval: MoEtion(costs),
    "none": lambda costs, mtbf_s, interval: NoCheckpoints(costs),
}
"""By the name of a job's strategy, for its costs, the mean time between failures, and its interval."""

SPARSE = ("moevement", "moevement-redo", "moevement-auto")
"""Those whose interval is a window."""


def predicted(scenario: Scenario, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the ETTR that the simulator predicts of each.

    Args:
        scenario: of the training, with its profile.
        samples: of all jobs over links of one rate.
    """
    # A second of the profile, in seconds of the jobs: the machine may be slower today, and links limited.
    scale = samples[0].iteration_s / scenario.time.total_s if samples[0].strategy == FREE else 1.0
    cluster = scenario.cluster
    scenario = replace(
        scenario,
        cluster=replace(
            cluster, network_bytes_per_s=cluster.network_bytes_per_s * scale, network_share=LINK_SHARE
        ),
    )  # fmt: skip
    costs_of = saving_costs(samples)
    names = dict.fromkeys(one.strategy for one in samples if one.strategy != FREE)
    calibrated = {name: _calibrated(scenario, _others(name, samples), costs_of, scale) for name in names}
    return [
        one if one.strategy == FREE else replace(one, predicted=_ettr(calibrated[one.strategy], one, scale))
        for one in samples
    ]


def _others(name: str, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of all strategies but one, whose own there are where it is alone."""
    its = [one for one in samples if one.strategy != FREE]
    return [one for one in its if one.strategy != name] or its


def _calibrated(
    scenario: Scenario, others: Sequence[Sample], costs_of: Mapping[str, SavingCost], scale: float
) -> Scenario:
    """Return the scenario with what the jobs of others have measured, in seconds of the profile."""
    saved = scenario.checkpointing
    killed = [one for one in others if one.parts]
    if killed:
        saved = replace(
            saved,
            detect_s=statistics.median(one.parts["notice"] for one in killed) / scale,
            regroup_s=statistics.median(one.parts["regroup"] for one in killed) / scale,
        )
    found = [
        contention
        for one in {one.strategy: one for one in others}.values()
        if (contention := _contention(scenario, one, costs_of)) is not None
    ]
    return replace(scenario, checkpointing=replace(saved, contention=statistics.median(found) if found else 0.0))


def _contention(scenario: Scenario, sample: Sample, costs_of: Mapping[str, SavingCost]) -> float | None:
    """Return the share of what a job's copies take of links by which they lengthened its training; None: none left."""
    if sample.strategy not in costs_of:
        return None
    alone = replace(scenario, checkpointing=replace(scenario.checkpointing, contention=1.0))
    costs = _of(alone, sample).costs()
    whole_s = SIMULATED[sample.strategy](costs, math.inf, sample.interval or 1).contended_s
    return costs_of[sample.strategy].share * costs.iteration_s / whole_s if whole_s else None


def _of(scenario: Scenario, sample: Sample) -> Scenario:
    """Return the scenario with the windows of a job."""
    if sample.strategy not in SPARSE:
        return scenario
    window, period = sample.snapshots or None, max(sample.interval, sample.snapshots) or None
    return replace(scenario, checkpointing=replace(scenario.checkpointing, window=window, period=period))


def _ettr(scenario: Scenario, sample: Sample, scale: float) -> float:
    costs = _of(scenario, sample).costs()
    strategy = SIMULATED[sample.strategy](costs, (sample.mtbf_s or math.inf) / scale, sample.interval or 1)
    failures = [Failure(at_s / scale, tuple(ranks)) for at_s, ranks in sample.kills]
    return train(strategy, failures, sample.training_s / scale).ettr
