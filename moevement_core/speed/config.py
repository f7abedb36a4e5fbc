"""Flags for slow ranks: from which factor a rank is named, and whether it gives its rank away."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.util.flags import flag, positive, within

SLOW_FACTOR, EVICT_SLOW, EVICT_SECONDS = (
    "--moevement-slow-factor", "--moevement-evict-slow", "--moevement-evict-slow-seconds",
)  # fmt: skip
LEAST_FACTOR = 1.05
"""Smallest factor that the flag accepts; below it, the scatter of iterations would decide."""


@dataclass(frozen=True)
class SpeedConfig:
    """Limits for the speed of ranks: when a rank counts as slow, and whether the job replaces it."""

    slow_factor: float = flag(
        SLOW_FACTOR, type=float, default=1.2, metavar="X", check=within(LEAST_FACTOR),
        help="name a rank or node whose own work takes X times as long as that of its peers for 20 iterations "
        "(default: 1.2)",
    )  # fmt: skip
    evict_slow: bool = flag(
        EVICT_SLOW, action="store_true",
        help="drain a slow rank or node, so that a spare takes over (needs --spares and --run-dir)",
    )  # fmt: skip
    evict_seconds: float = flag(
        EVICT_SECONDS, type=float, default=600.0, metavar="S", check=positive(None),
        help=f"least number of seconds from one rank or node that {EVICT_SLOW} drains to the next (default: 600)",
    )  # fmt: skip
