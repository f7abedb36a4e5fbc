"""What ``moevement bench ettr`` measures of one job, and its table and plot."""

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
"""The job that saves nothing and in which nobody is killed."""
SAVING_NOTHING = (FREE, "none")
"""Strategies without snapshots."""
NEVER = "never"
"""The schedule of a job that nobody is killed in."""
PARTS = {
    "notice": ("detect", "abort"),
    "regroup": ("regroup", "set up and fetch", "enter the loop"),
    "run again": ("replay",),
}
"""Of a recovery, as the table has them, by the names of the job's account."""


@dataclass(frozen=True)
class Sample:
    """Of one job."""

    strategy: str
    schedule: str
    """Of kills: :data:`NEVER`, their mean interval, or a trace."""
    mtbf_s: float | None
    """None: nobody was killed."""
    seed: int
    training_s: float
    """From the first iteration that was committed to the last."""
    iterations: int
    """In that time, each counted once."""
    kills: list[tuple[float, list[int]]]
    """Seconds after the first commit, and ranks."""
    repeated: int
    """Iterations that were committed more than once, or run again."""
    parts: dict[str, float]
    """Seconds of a recovery by :data:`PARTS`, medians; nothing without one."""
    iteration_s: float
    """Mean of those that no failure disturbed, all that lies between two of them included."""
    interval: int
    """W, or iterations from one checkpoint to the next, at the end."""
    host_mb: float
    """Of a rank: snapshots, copies and logs."""
    sent_mb: float
    """To peers, in an iteration of a rank."""
    lost: int
    """Routed tokens whose updates recoveries lost."""
    lost_share: float
    """Of all routed tokens (PLT)."""
    loss: float | None
    """On the validation set, in the end."""
    bits: str
    """Of the final state, against the job without kills."""
    progress: list[tuple[float, int]]
    losses: list[tuple[int, float]]
    """Of training, by iteration."""
    predicted: float | None = None
    """ETTR, by the simulator."""
    snapshots: int = 0
    """Of a window, where it is one."""
    overhead: float | None = None
    """Share of training time that saving costs, as the job measured it itself in the end; None: it measures none."""
    overhead_low: float | None = None
    overhead_high: float | None = None
    """Ends of its 95% confidence interval; None while there are too few comparisons for one."""
    lost_s: list[float] = field(default_factory=list)
    """Seconds that each failure took from training; failures that met count as one."""

    @property
    def available(self) -> float:
        """Share of the time that was not lost to failures. Both numbers are of this job: a machine that is slow for a
        while slows both.
        """
        return min(1.0, self.iterations * self.iteration_s / self.training_s)

    @property
    def is_recorded(self) -> bool:
        """Whether the kills are a trace's."""
        return "(" in self.schedule


@dataclass(frozen=True, slots=True)
class SavingCost:
    """What saving costs a strategy's jobs, as a share of training time."""

    share: float
    half: float
    """Half of its 95% confidence interval; NaN where there are too few comparisons for one."""


def saving_costs(samples: Sequence[Sample]) -> dict[str, SavingCost]:
    """Return by strategy what saving costs, as jobs that nobody disturbed measured; without one, as killed ones did.

    Each job compares its own iterations beside which something is saved with those beside which nothing is, so a
    machine that is slower in one job than in another does not count. Nothing for who saves nothing. A strategy whose
    jobs have measured nothing is left out.
    """
    costs = dict[str, SavingCost]()
    for name in dict.fromkeys(one.strategy for one in samples):
        its = [one for one in samples if one.strategy == name and one.overhead is not None]
        its = [one for one in its if one.mtbf_s is None] or its
        if name in SAVING_NOTHING:
            costs[name] = SavingCost(0.0, 0.0)
        elif its:
            halves = [
                (one.overhead_high - one.overhead_low) / 2 / math.sqrt(len(its))
                for one in its
                if one.overhead_high is not None and one.overhead_low is not None
            ]
            share = max(0.0, statistics.median(one.overhead or 0.0 for one in its))
            costs[name] = SavingCost(share, statistics.median(halves) if halves else math.nan)
    return costs


def sample_of(job: KilledJob, free: KilledJob, strategy: str, schedule: str, mtbf_s: float | None, seed: int) -> Sample:
    """Returns what came of ``job``, beside the job that saved nothing and was left alone."""
    metrics = job.record.metrics()
    failures = [event for event in job.record.events() if event["event"] == "failure"]
    recoveries = [event for event in job.record.events() if event["event"] == "recovery"]
    summary = job.record.summary()

    memory = [
        line["snapshot_memory_bytes"] + line["log_memory_bytes"] for line in metrics if "log_memory_bytes" in line
    ]
    sent = [line["replicated_bytes"] for line in metrics if "replicated_bytes" in line]
    # Two that went back to the same snapshot lost the same tokens.
    lost = sum({one["until"] - one["replayed"]: sum(one["lost_tokens"].values()) for one in recoveries}.values())
    checkpointing, iteration_s = summary.get("checkpointing") or {}, _undisturbed_s(metrics, failures)
    measured = next((found for line in reversed(metrics) if (found := recorded_overhead(line)) is not None), None)
    is_equal = summary["state_digest"]["all"] == free.record.summary()["state_digest"]["all"]
    return Sample(
        strategy, schedule, mtbf_s, seed, job.training_s, len({line["iteration"] for line in metrics}) - 1,
        [(one.at_s, list(one.nodes)) for one in job.kills], _repeated(job, failures), _parts(failures),
        iteration_s, int(checkpointing.get("window") or 0),
        statistics.median(memory or [0]) / 1e6, statistics.fmean(sent or [0]) / 1e6, lost,
        max((one["proportion_lost"] for one in recoveries), default=0.0), summary["validation_loss"],
        "equal" if is_equal else "updates lost" if lost else "DIFFERENT", job.progress,
        [(line["iteration"], float(line["loss"])) for line in metrics],
        snapshots=int(metrics[-1].get("window_snapshots") or 0),
        overhead=None if measured is None else measured.share,
        overhead_low=None if measured is None else measured.low,
        overhead_high=None if measured is None else measured.high,
        lost_s=_lost_s(metrics, [one["failed_at"] for one in failures], iteration_s),
    )  # fmt: skip


def _undisturbed_s(metrics: Sequence[dict[str, Any]], failures: Sequence[dict[str, Any]]) -> float:
    """Mean seconds from the end of an iteration to that of the next, where no failure comes between."""
    spans = [(one["failed_at"], one["resumed_at"]) for one in failures]
    steps = [
        line["time"] - before["time"]
        for before, line in pairwise(metrics[3:])
        if line["iteration"] == before["iteration"] + 1
        and not line.get("recovered")
        and not any(failed <= line["time"] and before["time"] <= resumed for failed, resumed in spans)
    ]
    return statistics.fmean(steps) if steps else float(metrics[-1]["iteration_s"] or 0.0)


def _lost_s(metrics: Sequence[dict[str, Any]], failed_at: Sequence[float], iteration_s: float) -> list[float]:
    """Return what each failure took, from the commit before it to the commit after it, less one iteration.

    The commit after it is that of the first iteration that had not been committed before: what is run again to come
    there is lost, too. Failures before that commit belong to the same loss.
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
        name: statistics.median(sum(one["parts"][part] for part in its) for one in failures)
        for name, its in PARTS.items()
    }


def _repeated(job: KilledJob, failures: Sequence[dict[str, Any]]) -> int:
    """What recoveries ran again, and what starts of the job went back behind."""
    replayed = sum(one["recovery"]["replayed"] for one in failures if one["recovery"])
    steps = zip(job.progress, job.progress[1:], strict=False)
    return replayed + sum(before - after + 1 for (_, before), (_, after) in steps if after <= before)


HEADER = (
    "a kill every", "strategy", "interval", "an iteration", "overhead", "available", "ETTR", "predicted", "kills",
    "repeated", "lost to a kill", *PARTS, "host memory", "sent", "tokens lost", "validation loss", "bits",
)  # fmt: skip


def rows_of(samples: Sequence[Sample]) -> list[list[str]]:
    """Returns a row of :data:`HEADER` for each strategy under each kind of schedule, over all its samples."""
    rows, costs = [], saving_costs(samples)
    for schedule, name in dict.fromkeys((one.schedule, one.strategy) for one in samples):
        those = [one for one in samples if (one.schedule, one.strategy) == (schedule, name)]
        predicted = [one.predicted for one in those if one.predicted is not None]
        losses = [one.loss for one in those if one.loss is not None]
        lost = [one for one in those if one.lost]
        seconds = [each for one in those for each in one.lost_s]
        rows.append([
            schedule, name, _interval(those[-1]), f"{statistics.median(one.iteration_s for one in those):.3f} s",
            _overhead(those), _mean([one.available for one in those]),
            str(ettr_of(those, costs[name])) if name in costs else "",
            _mean(predicted), str(sum(len(one.kills) for one in those)), str(sum(one.repeated for one in those)),
            f"{_mean(seconds, digits=1)} s" if seconds else "", *(_part(those, part) for part in PARTS),
            f"{max(one.host_mb for one in those):.0f} MB", f"{max(one.sent_mb for one in those):.1f} MB",
            f"{max(one.lost for one in lost)} ({max(one.lost_share for one in lost):.2%})" if lost else "",
            f"{statistics.fmean(losses):.4f}" if losses else "", ", ".join(sorted({one.bits for one in those})),
        ])  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class Ettr:
    """Share of the time that went into training, of all jobs of one strategy under one kind of schedule."""

    mean: float
    half: float
    """Half of its 95% confidence interval; NaN where too little was measured for one."""

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


def ettr_of(samples: Sequence[Sample], cost: SavingCost) -> Ettr:
    """Return the ETTR of some jobs: what failures left of their time, over 1 + what saving costs.

    Its interval is made of those of the mean loss to a failure and of the cost, which are taken to be independent. Jobs
    are few, and failures in them more.
    """
    available = statistics.fmean(one.available for one in samples)
    losses = [each for one in samples for each in one.lost_s]
    failures_per_s = len(losses) / sum(one.training_s for one in samples)
    of_losses = half_interval(losses) * failures_per_s if any(one.kills for one in samples) else 0.0
    of_cost = available * cost.half / (1 + cost.share)
    return Ettr(available / (1 + cost.share), math.hypot(of_losses, of_cost) / (1 + cost.share))


def _interval(sample: Sample) -> str:
    """Return how often state is saved: every so many iterations, in so many snapshots where it is not one."""
    return f"{sample.snapshots} of {sample.interval}" if sample.snapshots > 1 else str(sample.interval or "")


def _overhead(samples: Sequence[Sample]) -> str:
    """Return what the jobs measured: of one its interval, too; of several the median."""
    known = [one for one in samples if one.overhead is not None]
    if not known:
        return ""
    share = f"{statistics.median(one.overhead or 0.0 for one in known):.1%}"
    if len(known) > 1 or known[0].overhead_low is None or known[0].overhead_high is None:
        return share
    return f"{share} ({known[0].overhead_low:.1%} to {known[0].overhead_high:.1%})"


def _mean(values: Sequence[float], digits: int = 3) -> str:
    if not values:
        return ""
    half = f" ± {half_interval(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{half}"


def _part(samples: Sequence[Sample], part: str) -> str:
    seconds = [one.parts[part] for one in samples if one.parts]
    return f"{statistics.median(seconds):.2f} s" if seconds else ""


def plot(samples: Sequence[Sample], path: Path) -> None:
    """ETTR over the mean time between kills; iterations over time and losses where kills were the most frequent.

    Raises:
        ConfigError: it cannot be written.
    """
    killed = [one for one in samples if one.mtbf_s is not None and not one.is_recorded]
    killed = killed or [one for one in samples if one.mtbf_s is not None] or list(samples[1:])
    lowest = min((one for one in killed), key=lambda one: one.mtbf_s or 0.0)
    free, costs = samples[0], saving_costs(samples)
    with figure(path, 3, (18, 5)) as (over_mtbf, over_time, of_loss):
        of_loss.plot(*zip(*free.losses, strict=True), color="black", lw=2, label=free.strategy)
        for name in dict.fromkeys(one.strategy for one in killed if one.strategy in costs):
            those = [one for one in killed if one.strategy == name]
            rates = sorted({one.mtbf_s or 0.0 for one in those})
            means = [ettr_of([one for one in those if one.mtbf_s == rate], costs[name]).mean for rate in rates]
            (line,) = over_mtbf.plot(rates, means, marker="o", label=name)
            predicted = {rate: [one.predicted for one in those if one.mtbf_s == rate] for rate in rates}
            if all(one is not None for its in predicted.values() for one in its):
                each = [statistics.fmean(one or 0.0 for one in its) for its in predicted.values()]
                over_mtbf.plot(rates, each, ls=":", color=line.get_color())
            one = next(one for one in those if (one.schedule, one.seed) == (lowest.schedule, lowest.seed))
            over_time.step(*zip(*one.progress, strict=True), where="post", label=name)
            of_loss.plot(*zip(*one.losses, strict=True), lw=1, label=name)
        over_mtbf.set(xlabel="mean seconds between kills (dotted: predicted)", ylabel="ETTR", ylim=(0, 1.05))
        over_time.set(xlabel="seconds", ylabel="newest committed iteration", title=f"a kill every {lowest.schedule}")
        of_loss.set(xlabel="iteration", ylabel="training loss", title=f"a kill every {lowest.schedule}")
        for axes in (over_mtbf, over_time, of_loss):
            axes.grid(alpha=0.3)
            axes.legend()
