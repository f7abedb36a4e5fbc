"""Reports to the operators of the job: in the ranks' logs, in the launcher's output (rank 0's lines), and as events."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from moevement_core import log
from moevement_core.restart.generation import Generation, generation, is_fault_of_others
from moevement_core.run.events import Event
from moevement_core.trainer.binding import Binding


@dataclass(frozen=True)
class _FromThread:
    """Line of a thread that waits to be logged."""

    text: str
    generation: Generation | None
    """Generation in which it was reported."""
    at_s: float
    """Time of the report, in seconds of the monotonic clock."""
    may_be_explained: bool
    """True if a failure elsewhere may explain it."""


class Reports:
    """Reports of one rank.

    Args:
        binding: binding with the record that events go to.
        rank: number of this rank.
    """

    def __init__(self, binding: Binding, rank: int) -> None:
        self.warnings: list[str] = []
        """Warnings that operators must not miss."""
        self._binding, self._rank = binding, rank
        self._lock = threading.Lock()
        self._from_threads: deque[_FromThread] = deque()
        """Reports of threads that a failure elsewhere may still explain, in the order in which they came."""

    @property
    def is_recorded(self) -> bool:
        """True if this rank records events."""
        return self._binding.record is not None

    def log(self, text: str) -> None:
        """Log a line in this process."""
        log.info(text)

    def report(self, text: str) -> None:
        """Log a line about this rank, from any thread. Only the main thread may wait for it.

        A thread may fail because another rank failed, which takes a moment to be known and is reported elsewhere. Its
        line is then dropped. Lines keep their order.
        """
        is_from_thread = threading.current_thread() is not threading.main_thread()
        with self._lock:
            is_first = not self._from_threads
            if is_first and not is_from_thread:
                log.warning(text)
                return
            self._from_threads.append(_FromThread(text, generation(), time.monotonic(), is_from_thread))
        if is_first:
            try:  # no daemon, so that the last line of a process is logged
                threading.Thread(target=self._say_in_turn, name="moevement-report", daemon=False).start()
            except RuntimeError:  # the host has no thread left, or the process ends
                self._say_in_turn()

    def _say_in_turn(self) -> None:
        while True:
            report = self._from_threads[0]
            if not (report.may_be_explained and is_fault_of_others(report.generation, report.at_s)):
                log.warning(report.text)
            with self._lock:
                self._from_threads.popleft()
                if not self._from_threads:
                    return

    def log_once(self, text: str) -> None:
        """Log one line for all ranks. Collective in form: every rank calls it, and rank 0 logs."""
        if self._rank == 0:
            self.log(text)

    def warn(self, text: str, event: Event) -> None:
        """Report a warning in the launcher's output, as an event and in the summary. Every rank calls it."""
        self.warnings.append(text)
        if self._rank == 0:
            log.warning(text)
        self.event(event)

    def event(self, event: Event) -> None:
        """Append an event to the run's record, on the rank that keeps it."""
        if self._binding.record is not None:
            self._binding.record.event(event)
