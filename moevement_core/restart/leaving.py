"""Phases in which this rank leaves an interrupted generation: the current phase, and the duration of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from moevement_core import log


class LeavingPhase(StrEnum):
    """Phase in which a rank leaves a generation; the phases follow in this order."""

    SHUT_DOWN = "shut_down"
    """Phase that waits until data under way has arrived, and shuts down connections."""
    DRAIN = "drain"
    """Phase in which background threads notice the broken connections."""
    ABORT = "abort"
    """Phase that aborts communicators and destroys process groups."""
    UNWIND = "unwind"
    """Phase in which the main thread leaves training."""
    COLLECT = "collect"
    """Phase that cleans up what the interruption left half done, and releases unused memory."""


class Leaving:
    """Timer of the phases in which one rank leaves one generation. Phases follow each other, on different threads.

    Args:
        quiet_s: seconds within which a rank usually leaves its generation. Phases that begin within this time after the
            first phase are not reported.
        report: called with each phase that begins after ``quiet_s``; exceptions of the call are ignored.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        quiet_s: float = float("inf"),
        report: Callable[[LeavingPhase], None] = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds: dict[str, float] = {}
        """Duration in seconds of each ended phase, by name."""
        self._quiet_s, self._report, self._clock = quiet_s, report, clock
        self._phase: LeavingPhase | None = None
        self._began_at = self._phase_began_at = 0.0

    def begin(self, phase: LeavingPhase) -> None:
        """Begin a phase, and end the phase before it."""
        now = self._clock()
        if self._phase is None:
            self._began_at = now
        self._end_phase(now)
        self._phase, self._phase_began_at = phase, now
        if now - self._began_at > self._quiet_s:
            with suppress(Exception):  # The store may be gone, and this rank leaves in any case.
                self._report(phase)

    def end(self) -> None:
        """End the last phase; log the durations of all phases if they took longer than ``quiet_s`` together."""
        now = self._clock()
        self._end_phase(now)
        self._phase = None
        if self.seconds and now - self._began_at > self._quiet_s:
            log.warning(
                f"this rank took {now - self._began_at:.1f} s to leave its generation after an interruption; seconds "
                f"by phase: {in_words(self.seconds)}"
            )

    def _end_phase(self, now: float) -> None:
        if self._phase is not None:
            name = self._phase.value
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._phase_began_at


def in_words(seconds: dict[str, float]) -> str:
    """Return names and durations of phases in seconds, as text for the log."""
    return "  ".join(f"{phase.replace('_', ' ')} {took:.2f}" for phase, took in seconds.items())
