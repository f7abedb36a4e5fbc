"""What the simulator says of the jobs of ``moevement bench ettr``, from a profile of the training.

The jobs of one strategy calibrate what no profile has: how long a loss goes unnoticed, how long ranks take to regroup,
and how much copies slow training down on this machine. How often state is saved is taken from the jobs. Predicted is
how far a failure goes back, and how long what is run again takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moevement_cli.ettr_samples import FREE, Sample, SavingCost, saving_costs
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
    """Returns the samples with the ETTR that the simulator predicts of each.

    Args:
        scenario: of the training, with its profile.
        samples: of all jobs.
    """
    # A second of the profile, in seconds of the jobs: the machine may be slower today, and links limited.
    scale = samples[0].iteration_s / scenario.time.total_s if samples[0].strategy == FREE else 1.0
    calibrated = _calibrated(scenario, [one for one in samples if one.strategy != FREE], saving_costs(samples), scale)
    return [one if one.strategy == FREE else replace(one, predicted=_ettr(calibrated, one, scale)) for one in samples]


def _calibrated(
    scenario: Scenario, samples: Sequence[Sample], costs_of: Mapping[str, SavingCost], scale: float
) -> Scenario:
    """With the constants of the first strategy that has them, in seconds of the profile."""
    saved, cluster = scenario.checkpointing, scenario.cluster
    killed = [one for one in samples if one.parts]
    if killed:
        first = [one for one in killed if one.strategy == killed[0].strategy]
        saved = replace(
            saved,
            detect_s=statistics.median(one.parts["notice"] for one in first) / scale,
            regroup_s=statistics.median(one.parts["regroup"] for one in first) / scale,
        )
    scenario = replace(scenario, cluster=replace(cluster, network_bytes_per_s=cluster.network_bytes_per_s * scale))
    if samples:
        calm = samples[0]
        # The share by which training takes longer, of what copies take: the rest of its work is beside them.
        costs = _of(scenario, calm).costs()
        copied_s = costs.copy_s(SIMULATED[calm.strategy](costs, 0.0, calm.interval or 1).copied_bytes)
        slower_s = costs_of[calm.strategy].share * costs.iteration_s if calm.strategy in costs_of else 0.0
        saved = replace(saved, interference=slower_s / copied_s if copied_s else 0.0)
    return replace(scenario, checkpointing=saved)


def _of(scenario: Scenario, sample: Sample) -> Scenario:
    """With the window of a job."""
    if sample.strategy not in SPARSE:
        return scenario
    return replace(scenario, checkpointing=replace(scenario.checkpointing, window=sample.interval or None))


def _ettr(scenario: Scenario, sample: Sample, scale: float) -> float:
    costs = _of(scenario, sample).costs()
    strategy = SIMULATED[sample.strategy](costs, (sample.mtbf_s or float("inf")) / scale, sample.interval or 1)
    failures = [Failure(at_s / scale, tuple(ranks)) for at_s, ranks in sample.kills]
    return train(strategy, failures, sample.training_s / scale).ettr
