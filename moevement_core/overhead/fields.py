"""The overhead of saving as fields of a metrics line."""

from __future__ import annotations

from typing import Any

from moevement_core.overhead.estimate import Overhead

PARTS = ("copy", "digest", "send", "policy", "stall")
"""What the overhead is made of; see :class:`Overhead`."""
FIELDS = ("overhead", "overhead_low", "overhead_high", *(f"overhead_{part}" for part in PARTS))
"""Names of the fields, all of them shares of the time of an iteration without saving."""


def overhead_fields(overhead: Overhead | None) -> dict[str, Any]:
    """Return the fields of a metrics line; none before anything is measured. An end that is not known yet is None."""
    if overhead is None:
        return {}
    parts = {f"overhead_{part}": getattr(overhead, part) for part in PARTS}
    return {"overhead": overhead.share, "overhead_low": overhead.low, "overhead_high": overhead.high, **parts}
