"""Reports to people who run the job: in the ranks' logs, in the launcher's output (rank 0's lines), and as events."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from moevement_core import log
from moevement_core.restart.generation import Generation, generation, is_fault_of_others
from moevement_core.run.events import Event
from moevement_core.trainer.interface import BindingInterface


@dataclass(frozen=True)
class _FromThread:
    """Line that a thread has reported, and that is not logged yet."""

    text: str
    generation: Generation | None
    """Generation in which the line was reported."""
    at_s: float
    """Time of the report, in seconds of the monotonic clock."""
    may_be_explained: bool
    """True if a failure of another rank may explain the line."""


class Reports:
    """Reports that one rank makes.

    Args:
        binding: binding of this rank, with the record to which events are appended.
        rank: number of this rank.
    """

    def __init__(self, binding: BindingInterface, rank: int) -> None:
        self.warnings: list[str] = []
        """Warnings for the summary of the training run."""
        self._binding, self._rank = binding, rank
        self._lock = threading.Lock()
        self._from_threads: deque[_FromThread] = deque()
        """Lines that are not logged yet, in the order of their reports."""

    @property
    def is_recorded(self) -> bool:
        """True if this rank records events."""
        return self._binding.record is not None

    def log(self, text: str) -> None:
        """Log a line in this process."""
        log.info(text)

    def report(self, text: str) -> None:
        """Log a line about this rank; any thread may call it.

        A background thread may report an error whose cause is the failure of another rank. The job detects that failure
        a moment later, and reports it. So a separate thread holds the line back for that moment. It then drops the line
        if such a failure was detected, and logs it otherwise. Lines keep their order.
        """
        is_from_thread = threading.current_thread() is not threading.main_thread()
        with self._lock:
            is_first = not self._from_threads
            if is_first and not is_from_thread:
                log.warning(text)
                return
            self._from_threads.append(_FromThread(text, generation(), time.monotonic(), is_from_thread))
        if is_first:
            try:  # The thread is no daemon. So a process that ends still logs its last line.
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
        """Log one line for all ranks: every rank calls it, and only rank 0 logs. It does not communicate."""
        if self._rank == 0:
            self.log(text)

    def warn(self, text: str, event: Event) -> None:
        """Report a warning in the launcher's output, as an event and in the summary. Every rank calls it."""
        self.warnings.append(text)
        if self._rank == 0:
            log.warning(text)
        self.event(event)

    def event(self, event: Event) -> None:
        """Append an event to the record of the training run, if this rank keeps that record."""
        if self._binding.record is not None:
            self._binding.record.event(event)
