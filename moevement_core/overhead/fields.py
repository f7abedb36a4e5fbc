"""The overhead of saving as fields of a metrics line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moevement_core.overhead.estimate import REACH, Overhead
from moevement_core.overhead.quiet import WARM_UP

PARTS = ("copy", "digest", "send", "policy", "stall")
"""Parts of the overhead; see :class:`Overhead`."""
FIELDS = ("overhead", "overhead_low", "overhead_high", *(f"overhead_{part}" for part in PARTS))
"""Names of the fields, all of them shares of the time of an iteration without saving."""
FIRST_MEASURED = WARM_UP + REACH
"""The first iteration of a job whose line can have these fields: the first quiet one has all of its neighbours then."""


@dataclass(frozen=True, slots=True)
class RecordedOverhead:
    """Overhead as a metrics line has it, in shares of the time of an iteration without saving."""

    share: float
    """Share of training time for all parts together."""
    low: float | None
    """Lower end of the confidence interval of :attr:`share`; None while it is not known."""
    high: float | None
    """Upper end of the same interval."""
    parts: Mapping[str, float]
    """Share of each of ``PARTS``."""


def overhead_fields(overhead: Overhead | None) -> dict[str, Any]:
    """Return the fields of a metrics line; none before anything is measured. An end that is not known yet is None."""
    if overhead is None:
        return {}
    parts = {f"overhead_{part}": getattr(overhead, part) for part in PARTS}
    return {"overhead": overhead.share, "overhead_low": overhead.low, "overhead_high": overhead.high, **parts}


def recorded_overhead(line: Mapping[str, Any]) -> RecordedOverhead | None:
    """Return the overhead that a metrics line has; None if nothing was measured when it was written."""
    if line.get("overhead") is None:
        return None
    parts = {part: line.get(f"overhead_{part}") or 0.0 for part in PARTS}
    return RecordedOverhead(line["overhead"], line.get("overhead_low"), line.get("overhead_high"), parts)
