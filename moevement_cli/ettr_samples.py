"""Measurements that ``moevement bench ettr`` takes of one job, and its table and plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moevement_cli.killed_job import KilledJob
from moevement_cli.plotting import figure
from moevement_core.overhead.fields import recorded_overhead
from moevement_core.simulator.experiment import half_interval

FREE = "failure-free"
"""Strategy name of the reference job, which saves nothing and has no kills."""
SAVING_NOTHING = (FREE, "none")
"""Names of strategies without snapshots."""
NEVER = "never"
"""Name of the schedule without kills."""
PARTS = {
    "notice": ("detect", "abort"),
    "regroup": ("regroup", "set up and fetch", "enter the loop"),
    "run again": ("replay",),
}
"""Parts of a recovery that each column of the table sums. The parts have the names that failure events use."""


@dataclass(frozen=True)
class JobSample:
    """Measurements of one job."""

    strategy: str
    schedule: str
    """Name of the schedule of kills: :data:`NEVER`, or the mean time between kills, with the trace in parentheses."""
    mtbf_s: float | None
    """Mean seconds between kills. None: the job had no kills."""
    seed: int
    training_s: float
    """Seconds from the first committed iteration to the last."""
    iterations: int
    """Number of iterations committed in :attr:`training_s`; a repeated iteration counts once."""
    kills: list[tuple[float, list[int]]]
    """Kills: seconds after the first commit, and the ranks killed."""
    repeated: int
    """Number of iterations that the job replayed or committed a second time."""
    parts: dict[str, float]
    """Median seconds of each part of a recovery, by its name in :data:`PARTS`. Empty if the job had no failure."""
    iteration_s: float
    """Mean seconds between the ends of consecutive iterations that no failure disturbed."""
    interval: int
    """Iterations from one window to the next, or from one checkpoint to the next, at the end of the job."""
    host_mb: float
    """Median host memory of the rank that writes the metrics, for snapshots, copies and logs, in MB."""
    sent_mb: float
    """Mean data that the rank that writes the metrics sends to its peers in an iteration, in MB."""
    lost: int
    """Number of routed tokens whose updates were lost in recoveries."""
    lost_share: float
    """Share of the run's routed tokens whose updates were lost (PLT, equation 7 of MoC-System)."""
    loss: float | None
    """Loss on the validation set at the end of training."""
    bits: str
    """Comparison of the final state with that of the failure-free job: ``equal``, ``updates lost`` or ``DIFFERENT``."""
    progress: list[tuple[float, int]]
    losses: list[tuple[int, float]]
    """Training loss by iteration."""
    predicted: float | None = None
    """ETTR that the simulator predicts."""
    snapshots: int = 0
    """Snapshots per window (W); 1 if a single snapshot holds the whole checkpoint, 0 if nothing is saved."""
    overhead: float | None = None
    """Share of training time that saving costs, as the job reports it at its end. None: the job did not measure it."""
    overhead_low: float | None = None
    overhead_high: float | None = None
    """Upper end of the 95% confidence interval of :attr:`overhead`; ``overhead_low`` is the lower end.

    None: the job had too few comparisons.
    """
    lost_s: list[float] = field(default_factory=list)
    """Seconds that each failure took from training; see :func:`_lost_s`.

    If a further failure comes before the job has committed a new iteration, the two failures have one entry.
    """
    windows: list[list[int]] = field(default_factory=list)
    """Windows that the job had in turn, as its plans recorded them.

    Each entry has the iteration from which on windows had this form, the number of snapshots of a window, and the
    iterations from one window to the next.
    """
    killed_at: list[int] = field(default_factory=list)
    """Newest committed iteration at each of :attr:`kills`."""
    saving: float | None = None
    """Mean over the iterations of the job of the cost of saving that it had measured by then, as a share.

    None: fewer than a quarter of the iterations have a measured cost. The mean follows windows that change during the
    job, for example because ranks fail often; :attr:`overhead` is of the last windows.
    """

    @property
    def available(self) -> float:
        """Share of the time that was not lost to failures.

        The share is a ratio of two times of this job, so it is about the same on a slow machine.
        """
        return min(1.0, self.iterations * self.iteration_s / self.training_s)

    @property
    def is_recorded(self) -> bool:
        """True if the kills come from a trace. Only the names of such schedules contain parentheses."""
        return "(" in self.schedule


@dataclass(frozen=True, slots=True)
class SavingCost:
    """Cost of saving for all jobs of a strategy, as a share of training time."""

    share: float
    half: float
    """Half the width of the 95% confidence interval of :attr:`share`. NaN: there were too few comparisons."""


def saving_costs(samples: Sequence[JobSample]) -> dict[str, SavingCost]:
    """Return the cost of saving by strategy, as the jobs without kills measured it.

    A strategy without such a job uses its jobs with kills. A strategy that saves nothing costs nothing. The result
    leaves out a strategy whose jobs measured nothing.

    Each job compares its iterations that save with iterations of the same job in which saving pauses. A machine that is
    slower in one job than in another therefore does not change the result.
    """
    costs = dict[str, SavingCost]()
    for strategy in dict.fromkeys(sample.strategy for sample in samples):
        measured = [sample for sample in samples if sample.strategy == strategy and sample.overhead is not None]
        measured = [sample for sample in measured if sample.mtbf_s is None] or measured
        if strategy in SAVING_NOTHING:
            costs[strategy] = SavingCost(0.0, 0.0)
        elif measured:
            halves = [
                (sample.overhead_high - sample.overhead_low) / 2 / math.sqrt(len(measured))
                for sample in measured
                if sample.overhead_high is not None and sample.overhead_low is not None
            ]
            share = max(0.0, statistics.median(sample.overhead or 0.0 for sample in measured))
            costs[strategy] = SavingCost(share, statistics.median(halves) if halves else math.nan)
    return costs


def sample_of(
    job: KilledJob, free: KilledJob, strategy: str, schedule: str, mtbf_s: float | None, seed: int
) -> JobSample:
    """Return the measurements of ``job``, compared with ``free``, the job that saved nothing and had no kills."""
    metrics = job.record.metrics()
    failures = [event for event in job.record.events() if event["event"] == "failure"]
    recoveries = [event for event in job.record.events() if event["event"] == "recovery"]
    summary = job.record.summary()

    memory = [
        line["snapshot_memory_bytes"] + line["log_memory_bytes"] for line in metrics if "log_memory_bytes" in line
    ]
    sent = [line["replicated_bytes"] for line in metrics if "replicated_bytes" in line]
    # Recoveries from the same snapshot lost the same tokens, so the sum counts them once.
    lost = sum(
        {
            recovery["until"] - recovery["replayed"]: sum(recovery["lost_tokens"].values()) for recovery in recoveries
        }.values()
    )
    checkpointing, iteration_s = summary.get("checkpointing") or {}, _undisturbed_s(metrics, failures)
    measured = next((overhead for line in reversed(metrics) if (overhead := recorded_overhead(line)) is not None), None)
    is_equal = summary["state_digest"]["all"] == free.record.summary()["state_digest"]["all"]
    return JobSample(
        strategy, schedule, mtbf_s=mtbf_s, seed=seed, training_s=job.training_s,
        iterations=len({line["iteration"] for line in metrics}) - 1,
        kills=[(failure.at_s, list(failure.nodes)) for failure in job.kills], repeated=_repeated(job, failures),
        parts=_parts(failures), iteration_s=iteration_s, interval=int(checkpointing.get("window") or 0),
        host_mb=statistics.median(memory or [0]) / 1e6, sent_mb=statistics.fmean(sent or [0]) / 1e6, lost=lost,
        lost_share=max((recovery["proportion_lost"] for recovery in recoveries), default=0.0),
        loss=summary["validation_loss"], bits="equal" if is_equal else "updates lost" if lost else "DIFFERENT",
        progress=job.progress, losses=[(line["iteration"], float(line["loss"])) for line in metrics],
        snapshots=next((line["window_snapshots"] for line in reversed(metrics) if line.get("window_snapshots")), 0),
        overhead=None if measured is None else measured.share,
        overhead_low=None if measured is None else measured.low,
        overhead_high=None if measured is None else measured.high,
        lost_s=_lost_s(metrics, [failure["failed_at"] for failure in failures], iteration_s),
        windows=[
            [event["iteration"], event["snapshots"], event["window"]]
            for event in job.record.events()
            if event["event"] == "plan"
        ],
        killed_at=_killed_at(job, metrics), saving=_mean_cost(metrics),
    )  # fmt: skip


def _killed_at(job: KilledJob, metrics: Sequence[dict[str, Any]]) -> list[int]:
    """Return the newest committed iteration at each kill, that of the newest line of metrics before the kill."""
    times = [job.began_at + kill.at_s for kill in job.kills]
    return [
        next((int(line["iteration"]) for line in reversed(metrics) if line["time"] <= killed_s), 0)
        for killed_s in times
    ]


def _mean_cost(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean of the measured costs of saving; None if fewer than a quarter of the lines have one."""
    known = [overhead.share for line in metrics if (overhead := recorded_overhead(line)) is not None]
    return statistics.fmean(known) if known and 4 * len(known) >= len(metrics) else None


def _undisturbed_s(metrics: Sequence[dict[str, Any]], failures: Sequence[dict[str, Any]]) -> float:
    """Return the mean seconds from the end of an iteration to the end of the next.

    The mean leaves out pairs of iterations with a failure or a recovery between them.
    """
    spans = [(failure["failed_at"], failure["resumed_at"]) for failure in failures]
    steps = [
        line["time"] - before["time"]
        for before, line in pairwise(metrics[3:])
        if line["iteration"] == before["iteration"] + 1
        and not line.get("recovered")
        and not any(failed <= line["time"] and before["time"] <= resumed for failed, resumed in spans)
    ]
    return statistics.fmean(steps) if steps else float(metrics[-1]["iteration_s"] or 0.0)


def _lost_s(metrics: Sequence[dict[str, Any]], failed_at: Sequence[float], iteration_s: float) -> list[float]:
    """Return the seconds that each failure took: from the commit before it to the commit after it, less one iteration.

    The commit after a failure is the first commit of an iteration that was not committed before the failure. Iterations
    that the job repeats until this commit are lost time. Further failures until this commit belong to the same loss.
    """
    lost, until = list[float](), 0.0
    for failed in sorted(failed_at):
        before = [line for line in metrics if line["time"] <= failed]
        if failed < until or not before:
            continue
        newest = max(line["iteration"] for line in before)
        after = (line["time"] for line in metrics if line["time"] > failed and line["iteration"] > newest)
        if (next_at := next(after, None)) is not None:
            lost.append(max(0.0, next_at - before[-1]["time"] - iteration_s))
            until = next_at
    return lost


def _parts(failures: Sequence[dict[str, Any]]) -> dict[str, float]:
    if not failures:
        return {}
    return {
        name: statistics.median(sum(failure["parts"][part] for part in parts) for failure in failures)
        for name, parts in PARTS.items()
    }


def _repeated(job: KilledJob, failures: Sequence[dict[str, Any]]) -> int:
    """Return the number of iterations that recoveries replayed or that restarts of the job committed again."""
    replayed = sum(failure["recovery"]["replayed"] for failure in failures if failure["recovery"])
    steps = zip(job.progress, job.progress[1:], strict=False)
    return replayed + sum(before - after + 1 for (_, before), (_, after) in steps if after <= before)


HEADER = (
    "a kill every", "strategy", "interval", "an iteration", "overhead", "available", "ETTR", "predicted", "kills",
    "repeated", "lost to a kill", *PARTS, "host memory", "sent", "tokens lost", "validation loss", "bits",
)  # fmt: skip


def rows_of(samples: Sequence[JobSample]) -> list[list[str]]:
    """Return a row of :data:`HEADER` for each pair of schedule and strategy, from all samples of the pair."""
    rows, costs = [], saving_costs(samples)
    for schedule, name in dict.fromkeys((sample.schedule, sample.strategy) for sample in samples):
        group = [sample for sample in samples if (sample.schedule, sample.strategy) == (schedule, name)]
        predicted = [sample.predicted for sample in group if sample.predicted is not None]
        losses = [sample.loss for sample in group if sample.loss is not None]
        lost = [sample for sample in group if sample.lost]
        seconds = [loss_s for sample in group for loss_s in sample.lost_s]
        rows.append([
            schedule, name, _interval(group[-1]), f"{statistics.median(sample.iteration_s for sample in group):.3f} s",
            _overhead(group), _mean([sample.available for sample in group]),
            str(ettr_of(group, costs[name])) if name in costs else "",
            _mean(predicted), str(sum(len(sample.kills) for sample in group)),
            str(sum(sample.repeated for sample in group)),
            f"{_mean(seconds, digits=1)} s" if seconds else "", *(_part(group, part) for part in PARTS),
            f"{max(sample.host_mb for sample in group):.0f} MB", f"{max(sample.sent_mb for sample in group):.1f} MB",
            f"{max(sample.lost for sample in lost)} ({max(sample.lost_share for sample in lost):.2%})" if lost else "",
            f"{statistics.fmean(losses):.4f}" if losses else "", ", ".join(sorted({sample.bits for sample in group})),
        ])  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class Ettr:
    """Effective training time ratio over all jobs of one strategy under one schedule."""

    mean: float
    half: float
    """Half the width of the 95% confidence interval of :attr:`mean`. NaN: there were too few measurements."""

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


def ettr_of(samples: Sequence[JobSample], cost: SavingCost) -> Ettr:
    """Return the ETTR of ``samples``: mean share of time not lost to failures, divided by 1 + the cost of saving.

    The cost of a job with kills is its own (:attr:`JobSample.saving`), because windows may change when ranks fail
    often. If the job has not measured it, and in jobs without kills, it is ``cost``.

    The confidence interval combines two intervals as if they were independent: that of the mean time lost to a failure,
    and that of the cost.
    The mean is over failures rather than over jobs, because there are few jobs.
    """
    shares = [sample.saving if sample.kills and sample.saving is not None else cost.share for sample in samples]
    available = statistics.fmean(sample.available for sample in samples)
    mean = statistics.fmean(
        sample.available / (1 + max(0.0, share)) for sample, share in zip(samples, shares, strict=True)
    )
    losses = [loss_s for sample in samples for loss_s in sample.lost_s]
    failures_per_s = len(losses) / sum(sample.training_s for sample in samples)
    of_losses = half_interval(losses) * failures_per_s if any(sample.kills for sample in samples) else 0.0
    of_cost = available * cost.half / (1 + cost.share)
    return Ettr(mean, math.hypot(of_losses, of_cost) / (1 + cost.share))


def _interval(sample: JobSample) -> str:
    """Return the interval of saving as text: iterations, and the number of snapshots if there are several."""
    return f"{sample.snapshots} of {sample.interval}" if sample.snapshots > 1 else str(sample.interval or "")


def _overhead(samples: Sequence[JobSample]) -> str:
    """Return the overhead as text: for one job with its confidence interval, for several jobs the median alone."""
    known = [sample for sample in samples if sample.overhead is not None]
    if not known:
        return ""
    share = f"{statistics.median(sample.overhead or 0.0 for sample in known):.1%}"
    if len(known) > 1 or known[0].overhead_low is None or known[0].overhead_high is None:
        return share
    return f"{share} ({known[0].overhead_low:.1%} to {known[0].overhead_high:.1%})"


def _mean(values: Sequence[float], digits: int = 3) -> str:
    if not values:
        return ""
    half = f" ± {half_interval(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{half}"


def _part(samples: Sequence[JobSample], part: str) -> str:
    seconds = [sample.parts[part] for sample in samples if sample.parts]
    return f"{statistics.median(seconds):.2f} s" if seconds else ""


def plot(samples: Sequence[JobSample], path: Path) -> None:
    """Draw ETTR over the mean time between kills, and progress and losses of the jobs with the most frequent kills.

    Raises:
        ConfigError: the file cannot be written.
    """
    killed = [sample for sample in samples if sample.mtbf_s is not None and not sample.is_recorded]
    killed = killed or [sample for sample in samples if sample.mtbf_s is not None] or list(samples[1:])
    lowest = min((sample for sample in killed), key=lambda sample: sample.mtbf_s or 0.0)
    free, costs = samples[0], saving_costs(samples)
    with figure(path, 3, (18, 5)) as (over_mtbf, over_time, of_loss):
        of_loss.plot(*zip(*free.losses, strict=True), color="black", lw=2, label=free.strategy)
        for name in dict.fromkeys(sample.strategy for sample in killed if sample.strategy in costs):
            jobs = [sample for sample in killed if sample.strategy == name]
            rates = sorted({sample.mtbf_s or 0.0 for sample in jobs})
            at = {rate: [sample for sample in jobs if (sample.mtbf_s or 0.0) == rate] for rate in rates}
            means = [ettr_of(of_rate, costs[name]).mean for of_rate in at.values()]
            (line,) = over_mtbf.plot(rates, means, marker="o", label=name)
            predicted = [[sample.predicted for sample in of_rate] for of_rate in at.values()]
            if all(value is not None for values in predicted for value in values):
                averages = [statistics.fmean(value or 0.0 for value in values) for values in predicted]
                over_mtbf.plot(rates, averages, ls=":", color=line.get_color())
            shown = next(shown for shown in jobs if (shown.schedule, shown.seed) == (lowest.schedule, lowest.seed))
            over_time.step(*zip(*shown.progress, strict=True), where="post", label=name)
            of_loss.plot(*zip(*shown.losses, strict=True), lw=1, label=name)
        over_mtbf.set(xlabel="mean seconds between kills (dotted: predicted)", ylabel="ETTR", ylim=(0, 1.05))
        over_time.set(xlabel="seconds", ylabel="newest committed iteration", title=f"a kill every {lowest.schedule}")
        of_loss.set(xlabel="iteration", ylabel="training loss", title=f"a kill every {lowest.schedule}")
        for axes in (over_mtbf, over_time, of_loss):
            axes.grid(alpha=0.3)
            axes.legend()
