"""ETTR that the simulator predicts for the jobs of ``moevement bench ettr``, from a profile of the training.

Some inputs are not in a profile: the time until a failure is noticed, the time to regroup, and how much copies to peers
slow training. These inputs come from the jobs of *other* strategies over the same links. The interval of saving comes
from the job itself. The simulator predicts the rest: the cost of saving, the iterations that a failure rolls back, and
the time to recompute these iterations.
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
    Optimizations,
    Redo,
    Strategy,
)
from moevement_core.simulator.training import train

LIVE = Optimizations(skips_replicated=False, uses_bubbles=False)
"""Techniques of MoEtion that a live job has.

Its copies yield to training's communication, but wait for no bubbles; and peers receive all non-expert state.
"""

SIMULATED: dict[str, Callable[[Costs, float, int], Strategy]] = {
    "moevement": lambda costs, mtbf_s, interval: MoEvement(costs),
    "moevement-redo": lambda costs, mtbf_s, interval: Redo(costs),
    "moevement-auto": lambda costs, mtbf_s, interval: Redo(costs),
    "dense": lambda costs, mtbf_s, interval: DenseToPeers(costs, interval),
    "gemini": lambda costs, mtbf_s, interval: Gemini(costs, mtbf_s, interval=interval),
    "checkfreq": lambda costs, mtbf_s, interval: CheckFreq(costs, interval),
    "moc": lambda costs, mtbf_s, interval: MoC(costs),
    "moetion": lambda costs, mtbf_s, interval: MoEtion(costs, optimizations=LIVE),
    "none": lambda costs, mtbf_s, interval: NoCheckpoints(costs),
}
"""Functions that build the simulator's strategy, by the name of a job's strategy.

The arguments are the costs, the mean time between failures in seconds, and the interval in iterations. As in the
profile, the seconds are those of the machine on which the profile was made.
"""

SPARSE = ("moevement", "moevement-redo", "moevement-auto")
"""Names of strategies whose interval is a window."""


def predicted(scenario: Scenario, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples, each with the ETTR that the simulator predicts for it.

    Args:
        scenario: scenario of the training, with its profile.
        samples: samples of all jobs over links of the same rate. If the first one is that of the failure-free job, its
            iteration time says how the machine's speed differs from that in the profile.
    """
    # Factor by which iterations of the job are longer than in the profile: the machine's speed may have changed since.
    scale = samples[0].iteration_s / scenario.time.total_s if samples[0].strategy == FREE else 1.0
    cluster = scenario.cluster
    scenario = replace(
        scenario,
        cluster=replace(
            cluster, network_bytes_per_s=cluster.network_bytes_per_s * scale, network_share=LINK_SHARE
        ),
    )  # fmt: skip
    costs_of = saving_costs(samples)
    names = dict.fromkeys(sample.strategy for sample in samples if sample.strategy != FREE)
    calibrated = {name: _calibrated(scenario, _others(name, samples), costs_of, scale) for name in names}
    return [
        sample
        if sample.strategy == FREE
        else replace(sample, predicted=_ettr(calibrated[sample.strategy], sample, scale))
        for sample in samples
    ]


def _others(name: str, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of all other strategies, or all samples if there is no other strategy."""
    saving = [sample for sample in samples if sample.strategy != FREE]
    return [sample for sample in saving if sample.strategy != name] or saving


def _calibrated(
    scenario: Scenario, others: Sequence[Sample], costs_of: Mapping[str, SavingCost], scale: float
) -> Scenario:
    """Return the scenario with the delays and the contention that other jobs measured.

    The delays are divided by ``scale``, so that they fit the speed of the machine in the profile.
    """
    saved = scenario.checkpointing
    killed = [sample for sample in others if sample.parts]
    if killed:
        saved = replace(
            saved,
            detect_s=statistics.median(sample.parts["notice"] for sample in killed) / scale,
            regroup_s=statistics.median(sample.parts["regroup"] for sample in killed) / scale,
        )
    contentions = [
        contention
        for sample in {sample.strategy: sample for sample in others}.values()
        if (contention := _contention(scenario, sample, costs_of)) is not None
    ]
    return replace(
        scenario, checkpointing=replace(saved, contention=statistics.median(contentions) if contentions else 0.0)
    )


def _contention(scenario: Scenario, sample: Sample, costs_of: Mapping[str, SavingCost]) -> float | None:
    """Return the contention that follows from a job's overhead. None: the job has no copies or no measurement.

    Copies to peers occupy links for some seconds, and lengthen training by a part of these seconds. Contention is this
    part, as a share.
    """
    if sample.strategy not in costs_of:
        return None
    alone = replace(scenario, checkpointing=replace(scenario.checkpointing, contention=1.0))
    costs = _of(alone, sample).costs()
    whole_s = SIMULATED[sample.strategy](costs, math.inf, sample.interval or 1).contended_s
    return costs_of[sample.strategy].share * costs.iteration_s / whole_s if whole_s else None


def _of(scenario: Scenario, sample: Sample) -> Scenario:
    """Return the scenario with the window and the period of a job."""
    if sample.strategy not in SPARSE:
        return scenario
    window, period = sample.snapshots or None, max(sample.interval, sample.snapshots) or None
    return replace(scenario, checkpointing=replace(scenario.checkpointing, window=window, period=period))


def _ettr(scenario: Scenario, sample: Sample, scale: float) -> float:
    costs = _of(scenario, sample).costs()
    strategy = SIMULATED[sample.strategy](costs, (sample.mtbf_s or math.inf) / scale, sample.interval or 1)
    failures = [Failure(at_s / scale, tuple(ranks)) for at_s, ranks in sample.kills]
    return train(strategy, failures, sample.training_s / scale).ettr
