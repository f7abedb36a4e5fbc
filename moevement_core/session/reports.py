"""What an operator of the job sees: in the ranks' logs, in the launcher's output (rank 0's lines), and as events."""

from __future__ import annotations

import threading
from typing import Any

from moevement_core.restart.generation import is_fault_of_others
from moevement_core.session.binding import Binding


class Reports:
    """Of one rank.

    Args:
        binding: whose record the events go to.
        rank: this one.
    """

    def __init__(self, binding: Binding, rank: int) -> None:
        self.warnings: list[str] = []
        """What an operator must not miss."""
        self._binding, self._rank = binding, rank

    @property
    def is_recorded(self) -> bool:
        """Whether this rank records events."""
        return self._binding.record is not None

    def say(self, text: str) -> None:
        """A line of this process."""
        print(f"moevement: {text}", flush=True)

    def report(self, text: str) -> None:
        """A line about this rank; from any thread."""
        if threading.current_thread() is not threading.main_thread() and is_fault_of_others():
            return  # what ends now ends because a rank died, which is reported elsewhere
        self.say(f"rank {self._rank}: {text}")

    def say_once(self, text: str) -> None:
        """One line for all ranks, which call it alike."""
        if self._rank == 0:
            self.say(text)

    def warn(self, kind: str, text: str, **fields: Any) -> None:
        """What must not be missed: in the launcher's output, as an event, and in the summary. Every rank calls it."""
        self.warnings.append(text)
        self.say_once(f"WARNING: {text}")
        self.event(kind, text=text, **fields)

    def all_is_well(self, kind: str, text: str) -> None:
        """What was warned of is over. Every rank calls it."""
        self.say_once(text)
        self.event(kind, text=text)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the run's record, on the rank that keeps it."""
        if self._binding.record is not None:
            self._binding.record.event(kind, **fields)
