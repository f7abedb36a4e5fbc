"""Facts of a run for the table, the plot and the page of a report, read once from the run directory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moevement_cli.run_folders import which_run
from moevement_cli.saving_costs import SavingCosts
from moevement_core.errors import RunRecordError
from moevement_core.run.events import Resized
from moevement_core.run.figures import RunFigures
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from moevement_core.util.words import counted

UNKNOWN = "\N{EN DASH}"
DIGEST_LENGTH = 16
"""Characters of a state digest that are shown."""
Point = tuple[float, float]


class RunFacts:
    """Facts of one run, read from its record.

    Args:
        record: record of the run.
        name: name of the run in a report of several runs. With an empty string, the run has the name of its folder.

    Raises:
        RunRecordError: the folder holds no run that has trained, or its record is damaged.
    """

    def __init__(self, record: RunRecord, name: str = "") -> None:
        self.record = record
        self.name = name or record.folder.resolve().name
        self.lines, self.events = record.metrics(), record.events()
        self.job = record.job()
        if not self.lines:
            why = f" ({self.job.reason.splitlines()[0]})" if self.job is not None and self.job.reason else ""
            raise RunRecordError(
                f"{record.folder}: no metrics{why}; {which_run(record.folder)} that has begun to train"
            )
        self.summary = record.summary() if record.summary_path.exists() else {}
        self.recoveries = [event for event in self.events if event["event"] == "failure"]
        self.saving_costs = SavingCosts(self.lines)
        self.figures, self.effective = RunFigures(), list[Point]()
        self.began_at = _began_at(self.lines)
        """Time at which the first iteration began, in seconds since the epoch. NaN: no line has a time."""
        for line in self.lines:
            self.figures.take_line(line)
            ratio = self.figures.effective
            self.effective.append((self.elapsed_s(line.get("time")), math.nan if ratio is None else ratio))

    def elapsed_s(self, at: float | None) -> float:
        """Return the seconds from the beginning of the first iteration to ``at``. Return NaN if ``at`` is None."""
        return math.nan if at is None else at - self.began_at

    def series(self, *names: str) -> list[Point]:
        """Return pairs of each iteration and the sum of the metrics ``names``; NaN if one of them is missing."""
        return [(line["iteration"], sum(number(line.get(name)) for name in names)) for line in self.lines]

    def progress(self) -> list[Point]:
        """Return a curve: seconds since the first iteration began, and the newest committed iteration.

        The curve is flat while training stands still.
        """
        points: list[Point] = [(0.0, self.lines[0]["iteration"] - 1)]
        for line in self.lines:
            if (at := self.elapsed_s(line.get("time"))) == at:
                duration = number(line.get("iteration_s"))
                begin = max(points[-1][0], at - duration) if duration == duration else at
                points += [(begin, points[-1][1]), (at, line["iteration"])]
        return points

    def iteration_at(self, recovery: dict[str, Any]) -> int:
        """Return the newest iteration that the run had recorded when ``recovery`` ended."""
        before = [line["iteration"] for line in self.lines if line.get("time", math.inf) <= recovery["resumed_at"]]
        return int(max(before, default=self.lines[0]["iteration"]))

    @property
    def state(self) -> str:
        """State of the run in words: ended, failed, killed, or not ended yet."""
        if self.job is not None and self.job.code:
            return f"ended with exit code {self.job.code}: {self.job.reason.splitlines()[0] if self.job.reason else ''}"
        if self.summary:
            return "ended"
        is_abandoned = self.job is not None and self.job.is_abandoned
        return "killed with its launcher" if is_abandoned else "has not ended yet"

    @property
    def iteration_s(self) -> float | None:
        """Median duration of an iteration, in seconds."""
        return self._median("iteration_s")

    @property
    def tokens_per_s(self) -> float | None:
        """Median tokens per second."""
        return self._median("tokens_per_s")

    def _median(self, name: str) -> float | None:
        # Leave the first iteration out: it warms caches and pools, so its time is not typical.
        values = [line[name] for line in self.lines[1:] or self.lines if line.get(name)]
        return statistics.median(values) if values else None

    @property
    def digest(self) -> str | None:
        """Digest of the final state. None: the run has no final state."""
        return self.summary.get("state_digest", {}).get("all")

    @property
    def lost_s(self) -> float:
        """Seconds from failures to the resumption of training, summed over all recoveries."""
        return float(sum(recovery["total_s"] for recovery in self.recoveries))

    @property
    def replayed(self) -> int:
        """Number of iterations that recoveries repeated."""
        return sum(event["replayed"] for event in self.events if event["event"] == "recovery")

    @property
    def failures(self) -> str:
        """Number of failures and their cost, in words."""
        if not self.recoveries:
            return "no failure"
        failures, repeated = counted(len(self.recoveries), "failure"), counted(self.replayed, "iteration")
        return f"{failures}, {self.lost_s:.1f} s lost, {repeated} repeated"

    @property
    def resizes(self) -> list[str]:
        """Changes of the number of ranks, each as a sentence."""
        names = Resized.__dataclass_fields__
        return [
            Resized(**{name: event[name] for name in names}).sentence()
            for event in self.events
            if event["event"] == Resized.kind
        ]

    def origin(self) -> list[tuple[str, str]]:
        """Return names and values of the conditions of the run: date, model, ranks, machine, versions, command."""
        config = self.record.config() if self.record.config_path.exists() else {}
        facts = [("date", self._dates()), ("model", _model(config)), ("ranks", self._ranks(config))]
        if self.job is not None:
            facts += [
                ("machine", f"{self.job.host}: {self.job.hardware}"),
                ("versions", ", ".join(f"{name} {version}" for name, version in self.job.versions.items())),
                ("command", self.job.command),
            ]
        return [(name, value) for name, value in facts if value]

    def _dates(self) -> str:
        began_at = self.job.began_at if self.job is not None else self.began_at
        ended_at = self.job.ended_at if self.job is not None else None
        if not math.isfinite(began_at):
            return ""
        took = f", took {duration(ended_at - began_at)}" if ended_at is not None else ""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(began_at)) + took

    def _ranks(self, config: dict[str, Any]) -> str:
        starts = [event["world_size"] for event in self.events if event["event"] == "start"]
        world = self.summary.get("world_size") or (starts[-1] if starts else self.job.ranks if self.job else None)
        if world is None:
            return ""
        sizes = {
            "pipeline": "pipeline_model_parallel_size", "tensor": "tensor_model_parallel_size",
            "context": "context_parallel_size", "expert": "expert_model_parallel_size",
        }  # fmt: skip
        split = [f"{name} {config[field]}" for name, field in sizes.items() if config.get(field, 1) not in (None, 1)]
        parallel = f" ({', '.join(split)} parallel)" if split else ""
        spares = f", {counted(self.job.spares, 'spare')}" if self.job is not None and self.job.spares else ""
        return f"{world}{parallel}{spares}"


def read(folders: Sequence[Path]) -> list[RunFacts]:
    """Read runs, each with the shortest name that distinguishes it from the others."""
    return [RunFacts(RunRecord(path), name) for path, name in zip(folders, names(folders), strict=True)]


def names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each path: the fewest last parts of the path that distinguish all paths."""
    paths = [path.resolve() for path in folders]
    different = len(set(paths))
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        short = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(short)) == different:
            break
    return short


def verdict(runs: Sequence[RunFacts]) -> str:
    """Return words that say whether all runs equal the first run. The text is empty if no two runs can be compared."""
    first, *others = runs
    others = [run for run in others if run.record.folder.resolve() != first.record.folder.resolve()]
    if not others or not all(run.summary for run in runs):
        return ""
    try:
        compared = {run.name: compare(first.record, run.record) for run in others}
    except RunRecordError as error:
        return f"not compared: {error}"
    different = {name: comparison.first_difference for name, comparison in compared.items() if not comparison.equal}
    if not different:
        return "equal, bit for bit"
    return "; ".join(f"{name} DIFFERS from {first.name}: {where}" for name, where in different.items())


def headline(runs: Sequence[RunFacts]) -> str:
    """Return a sentence that says whether the runs are equal, and what failures cost each run."""
    failed = [run for run in runs if run.recoveries]
    if len(runs) == 1 or not failed:
        costs = [runs[0].failures if len(runs) == 1 else "no failure"]
    elif len(failed) == 1:
        costs = [failed[0].failures]
    else:
        costs = [f"{run.name}: {run.failures}" for run in failed]
    text = "; ".join(filter(None, [verdict(runs), *costs]))
    return (
        text[0].upper() + text[1:] if text.startswith(("equal", "no ", "not ")) else text
    )  # run names keep their case


def duration(seconds: float) -> str:
    """Return a duration in its two greatest units: ``12.6 s``, ``3 min 20 s``, ``5 h 12 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def number(value: Any) -> float:
    """Return a number of a record as a float.

    A missing number becomes NaN. A record holds NaN and infinity as strings, because JSON has no such numbers.
    """
    return math.nan if value is None else float(value)


def _model(config: dict[str, Any]) -> str:
    def of(name: str) -> Any:
        return config.get(name)

    if not of("num_layers") or not of("hidden_size"):
        return ""
    experts = f", {of('num_experts')} experts a layer (top-{of('moe_router_topk')})" if of("num_experts") else ""
    return f"{of('num_layers')} layers of width {of('hidden_size')}{experts}, sequences of {of('seq_length')} tokens"


def _began_at(lines: Sequence[dict[str, Any]]) -> float:
    line = next((line for line in lines if line.get("time") is not None), None)
    if line is None:
        return math.nan
    duration_s = number(line.get("iteration_s"))
    return float(line["time"]) - (duration_s if math.isfinite(duration_s) else 0.0)
