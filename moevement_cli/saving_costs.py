"""Cost of saving from the record of a run, as numbers and as text for tables, plots, pages and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from moevement_core.overhead.fields import FIRST_MEASURED, PARTS, RecordedOverhead, recorded_overhead
from moevement_core.util.words import counted

NAMES = dict(zip(PARTS, ("copies", "digests", "sends", "policy", "stalls"), strict=True))
"""Names of the parts of overhead in reports."""
NO_INTERVAL = "no interval yet"
Point = tuple[float, float]
Interval = tuple[float, float, float]
"""Tuple of x, and the low and the high end of the interval at x. An end that is not known is NaN."""


class NotMeasured(StrEnum):
    """Reason why a record has no overhead."""

    NO_CHECKPOINTS = "no checkpoints"
    TOO_SHORT = "too few iterations"
    NOT_COMPARED = "no comparison"


@dataclass(frozen=True)
class SavingCosts:
    """Costs of saving in one run.

    Args:
        lines: lines of the run's metrics.
    """

    lines: Sequence[Mapping[str, Any]]

    @cached_property
    def measured(self) -> list[tuple[int, RecordedOverhead | None]]:
        """Pairs of each iteration and the overhead that was known at its end."""
        return [(line["iteration"], recorded_overhead(line)) for line in self.lines]

    @property
    def newest(self) -> RecordedOverhead | None:
        """Last overhead that was recorded. None: nothing was measured."""
        return next((overhead for _, overhead in reversed(self.measured) if overhead is not None), None)

    @property
    def newest_at(self) -> int | None:
        """Iteration at whose end :attr:`newest` was recorded."""
        return next((iteration for iteration, overhead in reversed(self.measured) if overhead is not None), None)

    @property
    def reason(self) -> NotMeasured | None:
        """Reason why no overhead was measured. None if an overhead was measured."""
        if self.newest is not None:
            return None
        if not any("window" in line for line in self.lines):
            return NotMeasured.NO_CHECKPOINTS
        return NotMeasured.TOO_SHORT if len(self.lines) < FIRST_MEASURED else NotMeasured.NOT_COMPARED

    @property
    def reason_text(self) -> str:
        """Reason why no overhead was measured, in words. Empty if an overhead was measured."""
        return {
            None: "",
            NotMeasured.NO_CHECKPOINTS: "the run saves no checkpoints",
            NotMeasured.TOO_SHORT: f"{counted(len(self.lines), 'iteration')} recorded; needs {FIRST_MEASURED}",
            NotMeasured.NOT_COMPARED: (
                "no iteration without copies was compared; an older version may have written the record"
            ),
        }[self.reason]

    def text(self) -> str:
        """Return the newest overhead with its interval, in words."""
        if self.newest is None:
            return "not measured"
        return f"{percent(self.newest.share)} ({interval(self.newest)})"

    def points(self) -> list[Point]:
        """Return pairs of each iteration and the overhead in percent. An overhead that is not known is NaN."""
        return [
            (iteration, math.nan if overhead is None else 100 * overhead.share) for iteration, overhead in self.measured
        ]

    def intervals(self) -> list[Interval]:
        """Return the ends of the confidence interval in percent, by iteration."""
        return [(iteration, *_ends(overhead)) for iteration, overhead in self.measured]

    def as_json(self) -> dict[str, Any] | None:
        """Return the newest overhead as plain data."""
        overhead = self.newest
        if overhead is None:
            return None
        return {
            "iteration": self.newest_at, "share": overhead.share, "low": overhead.low, "high": overhead.high,
            "allowed": overhead.allowed, "parts": dict(overhead.parts),
        }  # fmt: skip


def _ends(overhead: RecordedOverhead | None) -> tuple[float, float]:
    if overhead is None or overhead.low is None or overhead.high is None:
        return math.nan, math.nan
    return 100 * overhead.low, 100 * overhead.high


def view(costs: Sequence[SavingCosts]) -> tuple[float, float]:
    """Return the range in percent that a drawing of ``costs`` shows.

    The range includes zero, all values, and each run's newest confidence interval. Older intervals may exceed the
    range: they come from few comparisons, and are often so wide that values would look flat.
    """
    shown = [0.0]
    for cost in costs:
        shown += [y for _, y in cost.points()]
        shown += _ends(cost.newest)
    finite = [y for y in shown if math.isfinite(y)]
    return min(finite), max(finite)


def parts_text(overhead: RecordedOverhead) -> Iterator[tuple[str, str]]:
    """Yield the name and the percentage of each part of the overhead."""
    for part, share in overhead.parts.items():
        yield NAMES[part], percent(share)


def percent(share: float) -> str:
    """Return a share as a percentage with one decimal place, never ``-0.0%``."""
    return f"{round(share, 3) + 0.0:.1%}"


def interval(overhead: RecordedOverhead) -> str:
    """Return the ends of the confidence interval in words."""
    if overhead.low is None or overhead.high is None:
        return NO_INTERVAL
    return f"{percent(overhead.low)} to {percent(overhead.high)}"
