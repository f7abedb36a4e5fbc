"""Figures of a run: numbers such as the loss or the seconds in recoveries, which Prometheus calls metrics.

This module has their names, units and meanings (:data:`FIGURES`), and computes their current values
(:class:`RunFigures`). The metrics endpoint (``exporter.py``), TensorBoard, ``moevement top`` and ``docs/metrics.md``
show them. Names and units follow Prometheus: a name ends with its base unit (seconds, bytes), and the name of a counter
ends with ``_total``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moevement_core.run.account import PARTS
from moevement_core.run.events import Corrupted, FastAgain, Resized, SlowPlaceFound, Started


class FigureKind(StrEnum):
    """Kind of a figure (in Prometheus: a metric); Prometheus distinguishes these kinds."""

    GAUGE = "gauge"
    """Figure (metric) whose value may rise and fall."""
    COUNTER = "counter"
    """Figure (metric) whose value only grows, until the process that counts is started again."""


@dataclass(frozen=True)
class Figure:
    """Description of a figure (in Prometheus: a metric) of a run: its name, unit, meaning and source."""

    name: str
    """Name without the prefix ``moevement_``, and without the suffix ``_total`` of a counter."""
    unit: str
    help: str
    """Meaning of the figure, as Prometheus and ``docs/metrics.md`` show it."""
    kind: FigureKind = FigureKind.GAUGE
    field: str = ""
    """Field of ``metrics.jsonl`` that holds the value; empty if the value has another source. The value of a counter is
    the sum of the field over all lines."""
    is_sum: bool = False
    """True if the field of a counter already holds a sum since the start of the process. Then the value of the counter
    is that of the newest line."""
    label: str | None = None
    """Name of the label that distinguishes several values of the figure; None if the figure has a single value."""
    is_in_tensorboard: bool = True

    @property
    def exported_name(self) -> str:
        """Name under which Prometheus shows this figure."""
        return f"moevement_{self.name}{'_total' if self.kind is FigureKind.COUNTER else ''}"

    @property
    def tag(self) -> str | None:
        """Name (tag) of the figure in TensorBoard; None if TensorBoard does not show the figure.

        If a counter has a field in ``metrics.jsonl``, TensorBoard shows the field: what an iteration adds to the
        counter, or, if :attr:`is_sum` is True, the counter itself.
        """
        return f"moevement/{self.field or self.name}" if self.is_in_tensorboard else None


EFFECTIVE = Figure(
    "effective_training_time_ratio", "", "Time of committed iterations, each counted once, divided by the time since "
    "the first iteration began. Failures, repeated iterations and evaluations make it less than 1.",
)  # fmt: skip
RECOVERIES = Figure("recoveries", "", "Failures that the job has recovered from.", FigureKind.COUNTER)
RECOVERY_S = Figure(
    "recovery_seconds",
    "seconds",
    "Time in recoveries, by part.",
    FigureKind.COUNTER,
    label="part",
    is_in_tensorboard=False,
)
LAST_RECOVERY_S = Figure("last_recovery_seconds", "seconds", "Seconds of the last recovery, by part.", label="part")
LAST_RECOVERED_AT = Figure(
    "last_recovery_timestamp_seconds", "seconds", "Time at which the last recovery ended, since the epoch.",
    is_in_tensorboard=False,
)  # fmt: skip
REPLAYED = Figure("replayed_iterations", "iterations", "Iterations that recoveries re-executed.", FigureKind.COUNTER)
LOST_TOKENS = Figure(
    "lost_tokens", "tokens", "Routed tokens whose updates recoveries have lost; 0 with strategies that lose none.",
    FigureKind.COUNTER,
)  # fmt: skip
WARNINGS = Figure(
    "warnings", "", "Events that need attention: no window persisted for a long time, windows not on disk, a recovery "
    "from disk, a dense checkpoint not saved.", FigureKind.COUNTER,
)  # fmt: skip
RANKS = Figure(
    "processes", "processes", "Live processes by role: active ranks, and spares.", label="role",
    is_in_tensorboard=False,
)  # fmt: skip
NODES = Figure("nodes", "nodes", "Nodes with an active rank.", is_in_tensorboard=False)
CORRUPTIONS = Figure(
    "corruptions", "", "Audits that have found wrong results (--moevement-audit-interval).", FigureKind.COUNTER,
    is_in_tensorboard=False,
)  # fmt: skip
SLOW = Figure("slow_ranks", "ranks", "Ranks that are slower than their peers now.", is_in_tensorboard=False)
REFUSED = Figure(
    "refused_connections", "connections", "Connections to the coordinator whose callers lacked the job's token "
    "(docs/security.md).", FigureKind.COUNTER, is_in_tensorboard=False,
)  # fmt: skip

OF_TRAINING = (
    Figure("iteration", "", "Newest committed iteration.", field="iteration", is_in_tensorboard=False),
    Figure(
        "iteration_timestamp_seconds", "seconds", "Time at which the newest iteration was recorded, since the epoch.",
        field="time", is_in_tensorboard=False,
    ),
    Figure("loss", "", "Training loss of the newest iteration.", field="loss"),
    Figure("gradient_norm", "", "Norm of the gradients of the newest iteration, before clipping.", field="grad_norm"),
    Figure("learning_rate", "", "Learning rate of the newest iteration.", field="learning_rate"),
    Figure("iteration_seconds", "seconds", "Duration of the newest iteration.", field="iteration_s"),
    Figure(
        "slowest_rank", "", "Rank whose own work took longest compared with its peers, in the last comparison.",
        field="slowest_rank",
    ),
    Figure(
        "slowest_factor", "", "Time of that rank's own work divided by that of its peers.", field="slowest_factor"
    ),
    Figure(
        "audited_iteration", "", "Newest iteration whose audit has found the stage of the rank that records this "
        "clean.", field="audited",
    ),
    Figure("audit_seconds", "seconds", "Seconds of audits.", FigureKind.COUNTER, field="audit_s"),
    Figure("tokens_per_second", "tokens/s", "Tokens per second in the newest iteration.", field="tokens_per_s"),
)  # fmt: skip
OF_CHECKPOINTS = (
    Figure(
        "window_iterations", "iterations", "Iterations from the start of a window to the start of the next one.",
        field="window",
    ),
    Figure(
        "window_snapshots", "snapshots", "Number of snapshots in a window (W). They belong to the first W iterations "
        "of the window, and together hold all state.", field="window_snapshots",
    ),
    Figure(
        "persisted_iteration", "", "First iteration of the newest recoverable run that all peers have; a failure rolls "
        "the job back to it.", field="persisted_from",
    ),
    Figure(
        "replication_lag_iterations", "iterations", "Iterations from the newest snapshot that all peers have to the "
        "newest captured snapshot.", field="replication_lag",
    ),
    Figure(
        "copies_under_way", "snapshots", "Copies of snapshots that peers do not have yet.",
        field="copies_under_way",
    ),
    Figure(
        "snapshot_memory_bytes", "bytes", "Host memory allocated for own snapshots and for snapshots of other ranks.",
        field="snapshot_memory_bytes",
    ),
    Figure(
        "log_memory_bytes", "bytes", "Host memory of the boundary log, from which a single stage replays.",
        field="log_memory_bytes",
    ),
    Figure("on_disk_iteration", "", "Iteration whose state the newest window on disk restores.", field="on_disk"),
    Figure(
        "disk_written_bytes", "bytes", "Bytes of windows that this process has written to disk.", FigureKind.COUNTER,
        field="disk_written_bytes", is_sum=True,
    ),
    Figure(
        "copied_bytes", "bytes", "Bytes copied from the device to its host.", FigureKind.COUNTER, field="copied_bytes"
    ),
    Figure(
        "replicated_bytes", "bytes", "Bytes of snapshots that peers have acknowledged, all peers together.",
        FigureKind.COUNTER, field="replicated_bytes",
    ),
    Figure(
        "logged_bytes",
        "bytes",
        "Bytes sent to other pipeline stages and logged.",
        FigureKind.COUNTER,
        field="log_bytes",
    ),
    Figure("stall_seconds", "seconds", "Seconds that training waited for a copy.", FigureKind.COUNTER, field="stall_s"),
    Figure(
        "overhead_ratio", "", "Share of training time that saving costs, from comparing iterations with neighbouring "
        "quiet ones.", field="overhead",
    ),
    Figure(
        "overhead_low_ratio", "", "Lower end of the 95% confidence interval of the overhead.", field="overhead_low"
    ),
    Figure(
        "overhead_high_ratio", "", "Upper end of the 95% confidence interval of the overhead.", field="overhead_high"
    ),
    Figure(
        "overhead_allowed_ratio", "", "Largest overhead that the job allows: the cap, or more while ranks fail often.",
        field="overhead_allowed",
    ),
    Figure(
        "overhead_copy_ratio", "", "Part of the overhead: the training thread issues copies.",
        field="overhead_copy",
    ),
    Figure("overhead_digest_ratio", "", "Part of the overhead for digests of copied bytes.", field="overhead_digest"),
    Figure("overhead_send_ratio", "", "Part of the overhead for sending and receiving copies.", field="overhead_send"),
    Figure(
        "overhead_policy_ratio", "", "Part of the overhead: the training thread decides on order and window.",
        field="overhead_policy",
    ),
    Figure(
        "overhead_stall_ratio", "", "Part of the overhead: training waits for a copy.", field="overhead_stall"
    ),
    Figure(
        "windows_abandoned", "windows", "Windows that this process gave up because host memory was full.",
        FigureKind.COUNTER, field="windows_abandoned", is_sum=True,
    ),
    Figure(
        "tokens_owed", "tokens", "Tokens for which experts still get extra capacity, with --moevement-capacity-boost.",
        field="tokens_owed",
    ),
    Figure(
        "expert_imbalance", "", "Load of the busiest rank divided by the mean load, with --moevement-expert-slots.",
        field="expert_imbalance",
    ),
)  # fmt: skip
OF_JOB = (
    EFFECTIVE, RANKS, NODES, SLOW, CORRUPTIONS, RECOVERIES, RECOVERY_S, LAST_RECOVERY_S, LAST_RECOVERED_AT, REPLAYED,
    LOST_TOKENS, WARNINGS, REFUSED,
)  # fmt: skip
FIGURES = (*OF_TRAINING, *OF_CHECKPOINTS, *OF_JOB)
WARNING_EVENTS = (
    "nothing_persisted", "windows_not_on_disk", "recovery_from_disk", "checkpoint_failed", "above_cap", "slow",
    "corrupted", "loss_spiked",
)  # fmt: skip


@dataclass(frozen=True)
class FigureSample:
    """Current value of a figure of a run, and the value of the figure's label if it has one."""

    figure: Figure
    value: float
    label: str | None = None


@dataclass
class RunFigures:
    """Values of the figures of one run, computed from the lines of ``metrics.jsonl`` and ``events.jsonl``.

    The caller passes each line once, and the lines of a file in their order.
    """

    line: dict[str, Any] = field(default_factory=dict)
    """Newest line of ``metrics.jsonl``."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """Events of the kind ``failure``, the oldest first."""
    iterations: int = 0
    """Number of lines of ``metrics.jsonl`` so far, one for each committed iteration."""
    world_size: int | None = None
    """Number of ranks of the job, according to the newest event with this number; None before the job has started."""
    slow: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Text of the warning about each place that is slow now, by its ranks."""
    _began_at: float | None = None
    """Time at which the first recorded iteration began, in seconds since the epoch."""
    _timed: int = 0
    """Number of iterations with a known duration. A line that a recovery wrote in place of a failed rank has none."""
    _timed_s: float = 0.0
    """Total duration in seconds of the iterations with a known duration."""
    _sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums of counters, by the name of the figure, or by ``NAME/LABEL`` for a figure with labels."""

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> RunFigures:
        """Return the figures of a whole run, computed from its record.

        Args:
            lines: all lines of ``metrics.jsonl``.
            events: all lines of ``events.jsonl``.
        """
        figures = RunFigures()
        for line in lines:
            figures.take_line(line)
        for event in events:
            figures.take_event(event)
        return figures

    def take_line(self, line: Mapping[str, Any]) -> None:
        """Update the figures from the next line of ``metrics.jsonl``."""
        # The line of a recovered iteration has no fields of checkpointing, so their earlier values stay.
        self.line = {**self.line, **line} if line.get("recovered") else dict(line)
        self.iterations += 1
        if (duration := _number(line.get("iteration_s"))) is not None:
            self._timed, self._timed_s = self._timed + 1, self._timed_s + duration
        if self._began_at is None and (at := _number(line.get("time"))) is not None:
            self._began_at = at - (duration or 0.0)
        for figure in (*OF_TRAINING, *OF_CHECKPOINTS):
            if figure.kind is FigureKind.COUNTER and (value := _number(line.get(figure.field))) is not None:
                self._sums[figure.name] = value if figure.is_sum else self._sums[figure.name] + value

    def take_event(self, event: Mapping[str, Any]) -> None:
        """Update the figures from the next line of ``events.jsonl``."""
        kind = event["event"]
        self.world_size = event.get("world_size", self.world_size)
        if kind == "failure":
            self.recoveries.append(dict(event))
            self._sums[RECOVERIES.name] += 1
            for part, seconds in event["parts"].items():
                self._sums[f"{RECOVERY_S.name}/{part}"] += seconds
        elif kind == "recovery":
            self._sums[REPLAYED.name] += event["replayed"]
            self._sums[LOST_TOKENS.name] += sum(event["lost_tokens"].values())
        elif kind in WARNING_EVENTS:
            self._sums[WARNINGS.name] += 1
        if kind == Corrupted.kind:
            self._sums[CORRUPTIONS.name] += 1
        elif kind == SlowPlaceFound.kind:
            self.slow[tuple(event["ranks"])] = event["text"]
        elif kind == FastAgain.kind:
            self.slow.pop(tuple(event["ranks"]), None)
        elif kind in (Started.kind, Resized.kind, "failure"):
            self.slow.clear()  # Ranks have moved, and places that are still slow are named again.

    @property
    def effective(self) -> float | None:
        """Effective training time ratio (ETTR), at most 1; None until the durations of two iterations are known."""
        at = _number(self.line.get("time"))
        if at is None or self._began_at is None or at <= self._began_at or self._timed < 2:
            return None
        return min(1.0, self._timed_s / self._timed * self.iterations / (at - self._began_at))

    @property
    def mean_iteration_s(self) -> float | None:
        """Mean duration of an iteration in seconds; None until the duration of an iteration is known."""
        return self._timed_s / self._timed if self._timed else None

    @property
    def began_at(self) -> float | None:
        """Time at which the first recorded iteration began, in seconds since the epoch; None before the first line."""
        return self._began_at

    def samples(self) -> Iterator[FigureSample]:
        """Yield the values of all known figures, in the order of :data:`FIGURES`.

        If a figure has several values, they follow each other.
        """
        for figure in FIGURES:
            if figure.kind is FigureKind.COUNTER:
                yield from self._counted(figure)
            elif figure.field and (value := _number(self.line.get(figure.field))) is not None:
                yield FigureSample(figure, value)
            elif figure is EFFECTIVE and (ratio := self.effective) is not None:
                yield FigureSample(figure, ratio)
            elif figure is LAST_RECOVERY_S and self.recoveries:
                yield from (
                    FigureSample(figure, seconds, part) for part, seconds in self.recoveries[-1]["parts"].items()
                )
            elif figure is LAST_RECOVERED_AT and self.recoveries:
                yield FigureSample(figure, self.recoveries[-1]["resumed_at"])
            elif figure is SLOW and self.line.get("slowest_factor") is not None:
                yield FigureSample(figure, sum(map(len, self.slow)))

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yield the tag and the value of each figure that TensorBoard shows.

        If a figure has a field in ``metrics.jsonl``, the value is the field in the newest line, even for a counter.
        """
        for figure in FIGURES:
            if figure.tag and figure.field and (value := _number(self.line.get(figure.field))) is not None:
                yield figure.tag, value
        for sample in self.samples():
            if (tag := sample.figure.tag) and not sample.figure.field:
                yield f"{tag}/{sample.label}" if sample.label else tag, sample.value

    def _counted(self, figure: Figure) -> Iterator[FigureSample]:
        if figure.label is not None:
            # Parts without a value count as 0, because Prometheus sees no increase in a figure that has just appeared.
            for part in PARTS:
                yield FigureSample(figure, self._sums.get(f"{figure.name}/{part}", 0.0), part)
        elif figure.name in self._sums or not figure.field:
            yield FigureSample(figure, self._sums.get(figure.name, 0.0))


def samples_of_processes(processes: Sequence[Mapping[str, Any]]) -> Iterator[FigureSample]:
    """Yield the values of the figures that count processes and nodes of a job.

    Args:
        processes: entries of ``ranks.json``.
    """
    for role in ("active", "spare"):
        yield FigureSample(RANKS, sum(process["role"] == role for process in processes), role)
    yield FigureSample(
        NODES, len({process.get("node", process["host"]) for process in processes if process["role"] == "active"})
    )


def _number(value: Any) -> float | None:
    """Return a value from the run record as a float; None if it is not a number.

    The record holds NaN and infinity as strings, because JSON has no such numbers.
    """
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
