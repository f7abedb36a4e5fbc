"""Fields of a line in the metrics file of a job that hold the overhead of saving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moevement_core.overhead.estimate import REACH, Overhead
from moevement_core.overhead.quiet import WARM_UP

PARTS = ("copy", "digest", "send", "policy", "stall")
"""Parts of the overhead; see :class:`Overhead`."""
FIELDS = ("overhead", "overhead_low", "overhead_high", "overhead_allowed", *(f"overhead_{part}" for part in PARTS))
"""Names of the fields; their values are shares of the time of an iteration without saving."""
FIRST_MEASURED = WARM_UP + REACH
"""First iteration whose metrics line can have the overhead: the last neighbour of the first quiet iteration."""


@dataclass(frozen=True, slots=True)
class RecordedOverhead:
    """Overhead that a metrics line records, as shares of the time of an iteration without saving."""

    share: float
    """Overhead of all parts together."""
    low: float | None
    """Lower end of the confidence interval of :attr:`share`; None while it is unknown."""
    high: float | None
    """Upper end of the confidence interval of :attr:`share`; None while it is unknown."""
    parts: Mapping[str, float]
    """Overhead of each part, by its name in ``PARTS``."""
    allowed: float | None = None
    """Largest overhead that the job allowed at this iteration: the cap, or more while ranks fail often (see
    :func:`moevement_core.overhead.cap.worthwhile`). None without a cap, or if an older version wrote the line."""


def overhead_fields(overhead: Overhead | None, allowed: float | None = None) -> dict[str, Any]:
    """Return the fields of a metrics line; empty before the first measurement. Unknown interval ends are None.

    Args:
        overhead: measured overhead; None before the first measurement.
        allowed: largest overhead that the job allows at present; None without a cap.
    """
    if overhead is None:
        return {}
    parts = {f"overhead_{part}": getattr(overhead, part) for part in PARTS}
    return {
        "overhead": overhead.share, "overhead_low": overhead.low, "overhead_high": overhead.high,
        "overhead_allowed": allowed, **parts,
    }  # fmt: skip


def recorded_overhead(line: Mapping[str, Any]) -> RecordedOverhead | None:
    """Return the overhead in a metrics line; None if the line was written before the first measurement."""
    if line.get("overhead") is None:
        return None
    parts = {part: line.get(f"overhead_{part}") or 0.0 for part in PARTS}
    low, high = line.get("overhead_low"), line.get("overhead_high")
    return RecordedOverhead(line["overhead"], low, high, parts, allowed=line.get("overhead_allowed"))
