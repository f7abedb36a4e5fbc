"""Phases in which this rank leaves an interrupted generation, with the seconds of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from moevement_core import log


class LeavingPhase(StrEnum):
    """A part of the way out of a generation, in their order."""

    SHUT_DOWN = "shut_down"
    """Connections are shut down, each when what is under way on it has arrived."""
    DRAIN = "drain"
    """Background threads notice that."""
    ABORT = "abort"
    """Communicators are aborted, and process groups destroyed."""
    UNWIND = "unwind"
    """The main thread comes out of training."""
    COLLECT = "collect"
    """Cleaning up after the interruption, and releasing unused memory."""


class Leaving:
    """Account of the phases of one rank and generation; they follow each other, on whatever thread.

    Args:
        quiet_s: seconds in which nothing is reported; a rank leaves in less as a rule.
        report: called with each phase that begins later than that; may raise, which is of no consequence.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        quiet_s: float = float("inf"),
        report: Callable[[LeavingPhase], None] = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds of each phase that is over, by its name."""
        self._quiet_s, self._report, self._clock = quiet_s, report, clock
        self._phase: LeavingPhase | None = None
        self._began_at = self._phase_began_at = 0.0

    def begin(self, phase: LeavingPhase) -> None:
        """Begin a phase, which ends the one before."""
        now = self._clock()
        if self._phase is None:
            self._began_at = now
        self._end_phase(now)
        self._phase, self._phase_began_at = phase, now
        if now - self._began_at > self._quiet_s:
            with suppress(Exception):  # the store may be gone, and this rank is to leave all the same
                self._report(phase)

    def end(self) -> None:
        """End the last phase; log all of them where that took long."""
        now = self._clock()
        self._end_phase(now)
        self._phase = None
        if self.seconds and now - self._began_at > self._quiet_s:
            log.warning(f"it took {now - self._began_at:.1f} s to stop after an interruption: {in_words(self.seconds)}")

    def _end_phase(self, now: float) -> None:
        if self._phase is not None:
            name = self._phase.value
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._phase_began_at


def in_words(seconds: dict[str, float]) -> str:
    """Return the seconds of phases, for the log."""
    return "  ".join(f"{phase.replace('_', ' ')} {took:.2f}" for phase, took in seconds.items())
