"""What ``moevement bench ettr`` measures of one job, and its table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from moevement_cli.killed_job import KilledJob
from moevement_cli.plotting import figure
from moevement_core.simulator.experiment import half_interval

FREE = "failure-free"
"""The job that saves nothing and in which nobody is killed."""
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


def slower(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns by strategy how many times as long an iteration takes as without checkpoints: the median over rounds.

    Args:
        samples: of rounds, each of which begins with the job that saves nothing and is left alone.
    """
    ratios, free_s = dict[str, list[float]](), samples[0].iteration_s
    for one in samples:
        if one.strategy == FREE:
            free_s = one.iteration_s
        ratios.setdefault(one.strategy, []).append(one.iteration_s / free_s)
    return {name: max(1.0, statistics.median(its)) for name, its in ratios.items()}


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
    is_equal = summary["state_digest"]["all"] == free.record.summary()["state_digest"]["all"]
    return Sample(
        strategy, schedule, mtbf_s, seed, job.training_s, len({line["iteration"] for line in metrics}) - 1,
        [(one.at_s, list(one.nodes)) for one in job.kills], _repeated(job, failures), _parts(failures),
        _undisturbed_s(metrics, failures), int((summary.get("checkpointing") or {}).get("window") or 0),
        statistics.median(memory or [0]) / 1e6, statistics.fmean(sent or [0]) / 1e6, lost,
        max((one["proportion_lost"] for one in recoveries), default=0.0), summary["validation_loss"],
        "equal" if is_equal else "updates lost" if lost else "DIFFERENT", job.progress,
        [(line["iteration"], float(line["loss"])) for line in metrics],
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
    "a kill every", "strategy", "interval", "overhead", "available", "ETTR", "predicted", "kills", "repeated", *PARTS,
    "host memory", "sent", "tokens lost", "validation loss", "bits",
)  # fmt: skip


def rows_of(samples: Sequence[Sample]) -> list[list[str]]:
    """Returns a row of :data:`HEADER` for each strategy under each kind of schedule, over all its samples."""
    rows, ratios = [], slower(samples)
    for schedule, name in dict.fromkeys((one.schedule, one.strategy) for one in samples):
        those = [one for one in samples if (one.schedule, one.strategy) == (schedule, name)]
        predicted = [one.predicted for one in those if one.predicted is not None]
        losses = [one.loss for one in those if one.loss is not None]
        lost = [one for one in those if one.lost]
        rows.append([
            schedule, name, str(those[-1].interval or ""),
            f"{ratios[name] - 1:.1%}", _mean([one.available for one in those]),
            _mean([one.available / ratios[name] for one in those]),
            _mean(predicted), str(sum(len(one.kills) for one in those)), str(sum(one.repeated for one in those)),
            *(_part(those, part) for part in PARTS),
            f"{max(one.host_mb for one in those):.0f} MB", f"{max(one.sent_mb for one in those):.1f} MB",
            f"{max(one.lost for one in lost)} ({max(one.lost_share for one in lost):.2%})" if lost else "",
            f"{statistics.fmean(losses):.4f}" if losses else "", ", ".join(sorted({one.bits for one in those})),
        ])  # fmt: skip
    return rows


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.3f}" + (f" ± {half_interval(values):.3f}" if len(values) > 1 else "")


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
    free, ratios = samples[0], slower(samples)
    with figure(path, 3, (18, 5)) as (over_mtbf, over_time, of_loss):
        of_loss.plot(*zip(*free.losses, strict=True), color="black", lw=2, label=free.strategy)
        for name in dict.fromkeys(one.strategy for one in killed):
            those = [one for one in killed if one.strategy == name]
            rates = sorted({one.mtbf_s or 0.0 for one in those})
            means = [
                statistics.fmean(one.available / ratios[name] for one in those if one.mtbf_s == rate) for rate in rates
            ]
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
