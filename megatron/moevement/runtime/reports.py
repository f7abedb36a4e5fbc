"""What an operator of the job is told: in the ranks' logs, by the launcher (rank 0's lines), and as events."""

from __future__ import annotations

import threading
from typing import Any

from megatron.moevement.restart import in_process as restart
from megatron.moevement.runtime.job import Job


class Reports:
    """Of one rank.

    Args:
        job: whose events they are.
        rank: this one.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.warnings: list[str] = []
        """What an operator must not miss."""
        self._job, self._rank = job, rank

    def report(self, text: str) -> None:
        """A line of this rank's; from any thread."""
        if threading.current_thread() is not threading.main_thread() and restart.is_fault_of_others():
            return  # what ends now ends because a rank died, which is told elsewhere
        print(f"moevement: rank {self._rank}: {text}", flush=True)

    def tell(self, text: str) -> None:
        """One line for all ranks, which call it alike."""
        if self._rank == 0:
            print(f"moevement: {text}", flush=True)

    def warn(self, kind: str, text: str, **fields: Any) -> None:
        """What must not be missed: in the launcher's output, as an event, and in the summary. Every rank calls it."""
        self.warnings.append(text)
        self.tell(f"WARNING: {text}")
        self._job.event(kind, text=text, **fields)

    def all_is_well(self, kind: str, text: str) -> None:
        """What was warned of is over. Every rank calls it."""
        self.tell(text)
        self._job.event(kind, text=text)
