"""Comparison of the costs that a run planned for its checkpoints with the costs that it measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moevement_core.planning.checkpoint_plan import INTERRUPTED

Record = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Compared:
    """Comparison of one plan of a run with what the run measured until the next plan."""

    first: int
    """Iteration after which the plan was made."""
    last: int
    """Last iteration under the plan."""
    window: int
    strategy: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Row:
    """Planned and measured value of one quantity."""

    what: str
    planned: float | None
    """Planned value. None: the plan does not have it."""
    measured: float | None
    """Measured value. None: the run has no measurement, for example because it had no recovery."""
    unit: str = "bytes"


def compare(lines: Record, events: Record) -> Iterator[Compared]:
    """Compare each plan of a run with what the run measured in the iterations under this plan.

    Args:
        lines: lines of the run's metrics.
        events: events of the run. Each event ``plan`` is a plan; without such events the function yields nothing.
    """
    plans = [event for event in events if event["event"] == "plan"]
    ends = [*(plan["iteration"] for plan in plans), math.inf][1:]
    for plan, end in zip(plans, ends, strict=True):
        under = [line for line in lines if plan["iteration"] < line["iteration"] <= end and "copied_bytes" in line]
        if not under:
            continue
        replayed = [
            event["replayed"] for event in events
            if event["event"] == "recovery" and plan["iteration"] <= event["until"] < end
        ]  # fmt: skip
        yield Compared(
            first=plan["iteration"], last=under[-1]["iteration"], window=plan["window"], strategy=plan["strategy"],
            rows=[
                Row("copied to the host in an iteration", plan["copied_bytes"], _mean(under, "copied_bytes")),
                Row("sent to peers in an iteration", plan["replicated_bytes"], _mean(under, "replicated_bytes")),
                Row(
                    "host memory, maximum", plan["memory_bytes"],
                    max(line["snapshot_memory_bytes"] + line["log_memory_bytes"] for line in under),
                ),
                Row(
                    "iterations that a recovery replays, on average", plan["expected_rollback"] - INTERRUPTED,
                    statistics.fmean(replayed) if replayed else None, "iterations",
                ),
                Row(
                    "iterations that a recovery replays, maximum", plan["most_replayed"],
                    max(replayed, default=None), "iterations",
                ),
            ],
        )  # fmt: skip


def _mean(lines: Record, name: str) -> float:
    return statistics.fmean(line[name] for line in lines)
