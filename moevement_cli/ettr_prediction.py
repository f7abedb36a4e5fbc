"""ETTR that the simulator predicts for the jobs of ``moevement bench ettr``, from a profile of the training.

Some inputs are not in a profile. For each strategy they come from jobs of *other* strategies, so that a prediction does
not use the results that it predicts:

- The time until a failure is noticed, and the time to regroup, come from jobs over the same links.
- Copies slow training in two ways. They take processor time for each byte, and copies to peers use the links of
  training. The simulator calls the two ``interference`` and ``contention``. A least-squares fit finds both from the
  overheads that jobs over links of all rates measured.

Three inputs come from the predicted job: its windows, the iterations in which ranks were killed, and the time of an
iteration, which shows how fast the machine was. The simulator predicts the rest: the cost of saving, the iterations
that a failure rolls back, and the time to recompute these iterations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moevement_cli.ettr_failures import Kill, WindowPhase, lost_s
from moevement_cli.ettr_samples import FREE, JobSample, saving_costs
from moevement_core.replication.spread import LINK_SHARE, TIME_SHARE
from moevement_core.simulator.costs import (
    CheckFreqCost,
    Costs,
    DenseToPeersCost,
    GeminiCost,
    MoCCost,
    MoEtionCost,
    MoEvementCost,
    NoCheckpointsCost,
    Optimizations,
    RedoCost,
    StrategyCost,
)
from moevement_core.simulator.scenario import Scenario

LIVE = Optimizations(skips_replicated=False, uses_bubbles=False)
"""Techniques of the strategy MoEtion that real jobs use; the simulator assumes no others for predictions.

Copies of a real job yield to training's communication, but do not wait for pipeline bubbles. Peers receive all
non-expert state.
"""

SIMULATED: dict[str, Callable[[Costs, float, int], StrategyCost]] = {
    "moevement": lambda costs, mtbf_s, interval: MoEvementCost(costs),
    "moevement-redo": lambda costs, mtbf_s, interval: RedoCost(costs),
    "moevement-auto": lambda costs, mtbf_s, interval: RedoCost(costs),
    "dense": lambda costs, mtbf_s, interval: DenseToPeersCost(costs, interval),
    "gemini": lambda costs, mtbf_s, interval: GeminiCost(costs, mtbf_s, interval=interval),
    "checkfreq": lambda costs, mtbf_s, interval: CheckFreqCost(costs, interval),
    "moc": lambda costs, mtbf_s, interval: MoCCost(costs),
    "moetion": lambda costs, mtbf_s, interval: MoEtionCost(costs, optimizations=LIVE),
    "none": lambda costs, mtbf_s, interval: NoCheckpointsCost(costs),
}
"""Functions that build the simulator's strategy, by the name of a job's strategy.

The arguments are the costs, the mean time between failures in seconds, and the interval in iterations. The caller
divides the seconds by :attr:`OverLinks.scale`, so that they fit the speed of the machine in the profile.
"""

SPARSE = ("moevement", "moevement-redo", "moevement-auto")
"""Names of strategies whose interval is a window."""


@dataclass(frozen=True)
class OverLinks:
    """Jobs whose links all have one rate."""

    scenario: Scenario
    """Scenario of the training, with its profile and the rate of the links."""
    samples: Sequence[JobSample]
    """Samples of the jobs.

    If the first sample is of the failure-free job, its iteration time shows how much the machine's speed has changed
    since the profile was made.
    """

    @property
    def scale(self) -> float:
        """Factor by which iterations are longer than in the profile, because the machine's speed has changed since."""
        first = self.samples[0]
        return first.iteration_s / self.scenario.time.total_s if first.strategy == FREE else 1.0


@dataclass(frozen=True)
class Slowing:
    """Slow-down of training by copies, as two factors of the simulator's scenario."""

    interference: float
    """Seconds by which copies to the host lengthen an iteration, over the seconds that these copies take."""
    contention: float
    """Seconds by which copies to peers lengthen an iteration, over the seconds that these copies occupy links."""


def predicted(links: Sequence[OverLinks]) -> list[list[JobSample]]:
    """Return copies of the samples of ``links`` with the predicted ETTR; a sample of the failure-free job gets none."""
    measured = [row for jobs in links for row in _measured(jobs)]
    return [
        [
            sample
            if sample.strategy == FREE
            else replace(sample, predicted=_ettr(_calibrated(jobs, sample.strategy, measured), sample, jobs))
            for sample in jobs.samples
        ]
        for jobs in links
    ]


@dataclass(frozen=True)
class CostOverLinks:
    """Cost of saving of one strategy over links of one rate: measured as a whole, and simulated in parts.

    All costs are shares of training time.
    """

    strategy: str
    share: float
    """Cost that jobs measured."""
    unslowed: float
    """Simulated cost if copies do not slow training: stalls alone."""
    of_interference: float
    """Simulated cost of copies to the host if :attr:`Slowing.interference` is 1."""
    of_contention: float
    """Simulated cost of copies to peers if :attr:`Slowing.contention` is 1."""


def _measured(jobs: OverLinks) -> Iterator[CostOverLinks]:
    """Yield a row for each strategy whose cost the jobs measured."""
    for name, cost in saving_costs(jobs.samples).items():
        if name not in SIMULATED:
            continue
        sample = _least_disturbed(jobs, name)
        unslowed, with_copies, with_sends = (
            _share(jobs, sample, slowing) for slowing in (Slowing(0.0, 0.0), Slowing(1.0, 0.0), Slowing(0.0, 1.0))
        )
        yield CostOverLinks(
            name, share=cost.share, unslowed=unslowed, of_interference=with_copies - unslowed,
            of_contention=with_sends - unslowed,
        )  # fmt: skip


def _least_disturbed(jobs: OverLinks, name: str) -> JobSample:
    """Return the sample of a job of strategy ``name``, of one without kills if there is one.

    The windows of this job are those with which :func:`saving_costs` measured the cost of the strategy.
    """
    return min((sample for sample in jobs.samples if sample.strategy == name), key=lambda it: it.mtbf_s is not None)


def _share(jobs: OverLinks, sample: JobSample, slowing: Slowing) -> float:
    """Return the simulated cost of saving of a job, as a share of training time."""
    return _overhead(_strategy(_slowed(_at_speed(jobs), slowing), sample, math.inf))


def _overhead(strategy: StrategyCost) -> float:
    """Return the simulated cost of saving as a share of training time."""
    return strategy.overhead_s / strategy.costs.iteration_s


def _calibrated(jobs: OverLinks, name: str, measured: Sequence[CostOverLinks]) -> Scenario:
    """Return the scenario of the jobs of strategy ``name``, with delays and slow-down from jobs of other strategies.

    If there are no other strategies, the jobs of ``name`` provide both. The delays are the times to notice a failure
    and to regroup, divided by :attr:`OverLinks.scale`, so that they fit the speed of the machine in the profile.
    """
    slowing = fitted([row for row in measured if row.strategy != name] or measured)
    scenario, scale = _slowed(_at_speed(jobs), slowing), jobs.scale
    saving = [sample for sample in jobs.samples if sample.strategy != FREE]
    killed = [sample for sample in [sample for sample in saving if sample.strategy != name] or saving if sample.parts]
    if not killed:
        return scenario
    delays = replace(
        scenario.checkpointing,
        detect_s=statistics.median(sample.parts["notice"] for sample in killed) / scale,
        regroup_s=statistics.median(sample.parts["regroup"] for sample in killed) / scale,
    )
    return replace(scenario, checkpointing=delays)


def fitted(measured: Sequence[CostOverLinks]) -> Slowing:
    """Return the slow-down with the least squared error over all rows; neither of its factors is below zero."""
    parts = np.array([(row.of_interference, row.of_contention) for row in measured]).reshape(-1, 2)
    wanted = np.array([row.share - row.unslowed for row in measured])
    both = np.linalg.lstsq(parts, wanted, rcond=None)[0]
    candidates = [both] if (both >= 0).all() else []
    for alone in (0, 1):  # If the best factors are not both positive, the best allowed ones have one factor of zero.
        squares = float(parts[:, alone] @ parts[:, alone])
        factors = np.zeros(2)
        factors[alone] = max(0.0, float(parts[:, alone] @ wanted) / squares) if squares else 0.0
        candidates.append(factors)
    best = min(candidates, key=lambda factors: float(((parts @ factors - wanted) ** 2).sum()))
    return Slowing(interference=float(best[0]), contention=float(best[1]))


def _at_speed(jobs: OverLinks) -> Scenario:
    """Return the scenario with links so fast that a transfer takes the same share of an iteration as in the jobs."""
    cluster = jobs.scenario.cluster
    return replace(
        jobs.scenario,
        cluster=replace(
            cluster, network_bytes_per_s=cluster.network_bytes_per_s * jobs.scale, network_share=LINK_SHARE
        ),
    )  # fmt: skip


def _slowed(scenario: Scenario, slowing: Slowing) -> Scenario:
    saved = scenario.checkpointing
    return replace(
        scenario,
        checkpointing=replace(saved, interference=slowing.interference, contention=slowing.contention),
    )


def _strategy(scenario: Scenario, sample: JobSample, mtbf_s: float) -> StrategyCost:
    """Return the simulated strategy with the windows that a job had at its end."""
    return _with_windows(scenario, sample.strategy, snapshots=sample.snapshots, interval=sample.interval, mtbf_s=mtbf_s)


def _with_windows(scenario: Scenario, name: str, snapshots: int, interval: int, mtbf_s: float) -> StrategyCost:
    """Return a simulated strategy.

    In a real job, a sender takes a larger share of its link if the sends would otherwise not end in time. The returned
    strategy has this share.

    Args:
        scenario: scenario of the job.
        name: name of the job's strategy.
        snapshots: number of snapshots of a window.
        interval: iterations from one window to the next, or from one checkpoint to the next.
        mtbf_s: mean seconds between failures, for the speed of the machine in the profile.
    """
    if name in SPARSE:
        # A simulated stage has the operators of one rank, so it may have fewer slots than the window of a real one.
        most = max(len(stage.table) for stage in scenario.costs().plan.stages)
        window = min(snapshots, most)
        saved = replace(scenario.checkpointing, window=window or None, period=max(interval, window) or None)
        scenario = replace(scenario, checkpointing=saved)
    build = SIMULATED[name]
    strategy = build(scenario.costs(), mtbf_s, max(1, interval))
    cluster = scenario.cluster
    seconds = cluster.link_s(scenario.checkpointing.replicas * strategy.sent_bytes)
    needed = min(1.0, seconds / strategy.costs.iteration_s / TIME_SHARE)
    if needed <= cluster.network_share:
        return strategy
    return build(replace(scenario, cluster=replace(cluster, network_share=needed)).costs(), mtbf_s, max(1, interval))


def _ettr(scenario: Scenario, sample: JobSample, jobs: OverLinks) -> float:
    """Return the ETTR of a job: the simulated share of time that failures leave, divided by 1 + the cost of saving."""
    if not sample.kills:
        return 1 / (1 + _overhead(_strategy(scenario, sample, math.inf)))
    last = _strategy(scenario, sample, math.inf)
    # The machine's speed varies from job to job, so the job's own iterations say how long simulated seconds are.
    scale = sample.iteration_s / (last.costs.iteration_s + last.overhead_s)
    delays, factor = scenario.checkpointing, jobs.scale / scale
    delays = replace(delays, detect_s=delays.detect_s * factor, regroup_s=delays.regroup_s * factor)
    phases = _phases(replace(scenario, checkpointing=delays), sample, (sample.mtbf_s or math.inf) / scale)
    each_s = sample.iteration_s / scale
    committed = sample.killed_at or [int(at_s / scale / each_s) for at_s, _ in sample.kills]
    kills = [
        Kill(newest, at_s / scale, tuple(ranks)) for newest, (at_s, ranks) in zip(committed, sample.kills, strict=True)
    ]
    ends = [*(later.first for later in phases[1:]), sample.iterations]
    lengths = [max(0, end - max(0, phase.first)) for phase, end in zip(phases, ends, strict=True)]
    costs = [length * _overhead(phase.strategy) for phase, length in zip(phases, lengths, strict=True)]
    work_s = sample.iterations * each_s
    return work_s / (work_s + lost_s(phases, kills)) / (1 + sum(costs) / max(1, sum(lengths)))


def _phases(scenario: Scenario, sample: JobSample, mtbf_s: float) -> list[WindowPhase]:
    """Return the phases of a job with their simulated strategies; a single one if the job recorded no windows."""
    return [
        WindowPhase(
            first,
            _with_windows(
                scenario, sample.strategy, snapshots=snapshots, interval=interval, mtbf_s=mtbf_s
            ).fresh(sample.iterations),
        )
        for first, snapshots, interval in sample.windows or [[0, sample.snapshots, sample.interval]]
    ]  # fmt: skip
