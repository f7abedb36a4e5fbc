"""Flag for audits: how often a stage executes an iteration again to find silent corruption."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.util.flags import at_least, flag

AUDIT_INTERVAL = "--moevement-audit-interval"


@dataclass(frozen=True)
class AuditConfig:
    """Interval between audits of pipeline stages, in iterations."""

    interval: int | None = flag(
        AUDIT_INTERVAL, type=int, metavar="N", check=at_least(1),
        help="look for silent corruption: every N iterations, one pipeline stage in turn executes the iteration again "
        "and compares the results; data-parallel replicas compare their weights after every window (default: never)",
    )  # fmt: skip

    def stage_of(self, iteration: int, stages: int) -> int | None:
        """Return the pipeline stage that audits ``iteration``; None if no stage does.

        Args:
            iteration: number of an iteration, counted from 1.
            stages: number of pipeline stages of the job.
        """
        if self.interval is None or iteration % self.interval:
            return None
        return (iteration // self.interval - 1) % stages
