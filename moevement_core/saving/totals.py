"""Totals of checkpointing in a training run, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.engine.progress import CheckpointCounters
from moevement_core.run.outcome import Recovery
from moevement_core.util.iterations import reached_by_all


@dataclass
class Totals:
    """Totals of one rank's checkpointing."""

    iterations: int = 0
    stall_s: float = 0.0
    train_s: float = 0.0
    begin_s: float = 0.0
    """Seconds that the training thread spent on boundary records, on decisions, and on issuing copies."""
    last_begin_s: float = 0.0
    """Seconds that the beginning of the last iteration added to :attr:`begin_s`."""
    copied_bytes: int = 0
    replicated_bytes: int = 0

    def began(self, begin_s: float) -> None:
        """Add the seconds that saving took from the training thread at the beginning of an iteration."""
        self.last_begin_s = begin_s
        self.begin_s += begin_s

    def ended(self, step_s: float, progress: CheckpointCounters) -> None:
        """Add the seconds and bytes of a completed iteration."""
        self.iterations += 1
        self.train_s += step_s
        self.copied_bytes += progress.copied_bytes
        self.replicated_bytes += progress.replicated_bytes


def summary(
    totals: Totals,
    progress: CheckpointCounters,
    on_disk: tuple[int | None, int, int, float],
    decided: tuple[int, int, int],
    warnings: Sequence[str],
    recoveries: Sequence[Recovery],
    window: int,
) -> dict[str, Any]:
    """Return the checkpointing entry of the training run's summary, over all ranks. Every rank calls it.

    Args:
        totals: totals of this rank.
        progress: progress of this rank's checkpointing.
        on_disk: iteration that the newest window on disk restores, number of windows that could not be written, and
            bytes and seconds of writing.
        decided: numbers of windows and reorders, and the largest number of consecutive iterations without a newly
            persisted window.
        warnings: warnings that this rank has reported.
        recoveries: recoveries of this process.
        window: iterations of a window of the newest schedule.
    """
    per_rank = all_gather_objects(
        (totals, progress, on_disk, decided),
        tuple[Totals, CheckpointCounters, tuple[int | None, int, int, float], tuple[int, int, int]],
    )
    all_totals, all_progress, disk, decisions = ([sent[part] for sent in per_rank] for part in range(4))
    all_warnings = all_gather_objects(list(warnings), list[str])
    longest_s = max(rank_totals.train_s for rank_totals in all_totals) or 1.0
    return {
        "stall_s": max(rank_totals.stall_s for rank_totals in all_totals),
        "stall_share": max(rank_totals.stall_s for rank_totals in all_totals) / longest_s,
        "training_thread_s": max(rank_totals.begin_s for rank_totals in all_totals),
        "training_thread_share": max(rank_totals.begin_s for rank_totals in all_totals) / longest_s,
        "copied_bytes": sum(rank_totals.copied_bytes for rank_totals in all_totals),
        "replicated_bytes": sum(rank_totals.replicated_bytes for rank_totals in all_totals),
        "window": window,
        "windows": max(decided[0] for decided in decisions),
        "windows_abandoned": sum(rank_progress.abandoned for rank_progress in all_progress),
        "reorders": max(decided[1] for decided in decisions),
        "persisted_from": reached_by_all(rank_progress.persisted for rank_progress in all_progress),
        "longest_unpersisted": max(decided[2] for decided in decisions),
        "memory_bytes": max(rank_progress.memory_bytes for rank_progress in all_progress),
        "recoveries": [recovery.as_dict() for recovery in recoveries],
        "on_disk": reached_by_all(disk_totals[0] for disk_totals in disk),
        "disk_windows_failed": max(disk_totals[1] for disk_totals in disk),
        "disk_bytes": sum(disk_totals[2] for disk_totals in disk),
        "disk_s": max(disk_totals[3] for disk_totals in disk),
        "warnings": max(all_warnings, key=len),  # a rank that joined later has fewer warnings
    }
