"""Flags for audits: how often a stage executes an iteration again, and whether ranks watch their memory."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.util.flags import at_least, flag

AUDIT_INTERVAL, AUDIT_MEMORY = "--moevement-audit-interval", "--moevement-audit-memory"


@dataclass(frozen=True)
class AuditConfig:
    """Ways in which a job looks for silent corruption."""

    interval: int | None = flag(
        AUDIT_INTERVAL, type=int, metavar="N", check=at_least(1),
        help="look for silent corruption: every N iterations, one pipeline stage in turn executes the iteration again "
        "and compares the results; data-parallel replicas compare their weights after every window (default: never)",
    )  # fmt: skip

    memory: bool = flag(
        AUDIT_MEMORY, action="store_true",
        help="look for weights and optimizer state that change in memory: in each iteration, compare their digests "
        "after the last update with those before the next one",
    )  # fmt: skip

    @property
    def is_on(self) -> bool:
        """True if the job looks for silent corruption in any way."""
        return self.memory or self.interval is not None

    def stage_of(self, iteration: int, stages: int) -> int | None:
        """Return the pipeline stage that audits ``iteration``; None if no stage does.

        Args:
            iteration: number of an iteration, counted from 1.
            stages: number of pipeline stages of the job.
        """
        if self.interval is None or iteration % self.interval:
            return None
        return (iteration // self.interval - 1) % stages
