"""What an operator of the job sees: in the ranks' logs, in the launcher's output (rank 0's lines), and as events."""

from __future__ import annotations

import threading

from moevement_core import log
from moevement_core.events import Event
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
        log.info(text)

    def report(self, text: str) -> None:
        """A line about this rank; from any thread. Others than the main thread are not held up by it."""
        if threading.current_thread() is threading.main_thread():
            log.warning(text)
        else:
            threading.Thread(target=_warn_unless_of_others, args=(text,), name="moevement-report").start()

    def say_once(self, text: str) -> None:
        """One line for all ranks, which call it alike."""
        if self._rank == 0:
            self.say(text)

    def warn(self, text: str, event: Event) -> None:
        """What must not be missed: in the launcher's output, as an event, and in the summary. Every rank calls it."""
        self.warnings.append(text)
        if self._rank == 0:
            log.warning(text)
        self.event(event)

    def event(self, event: Event) -> None:
        """Append an event to the run's record, on the rank that keeps it."""
        if self._binding.record is not None:
            self._binding.record.event(event)


def _warn_unless_of_others(text: str) -> None:
    """What ends now may end because a rank died, which is reported elsewhere; that takes a moment to be known."""
    if not is_fault_of_others():
        log.warning(text)
