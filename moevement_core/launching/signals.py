"""Handlers of the signals that ask a launcher, a task or a coordinator to end its job, orderly or at once."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, NoReturn

from moevement_core.launching.children import END_SIGNALS, WIND_DOWN_SIGNALS
from moevement_core.util.interrupts import is_importing

REPEAT_S = 1.0
"""Seconds after a signal that asks for an orderly end, in which further such signals are ignored as duplicates.

For example, ``timeout`` sends one signal to the command and a second one to the process group. Batch systems signal
each process, and ``srun`` then forwards the same signal once more.
"""


class Stopped(BaseException):
    """Exception that ends the job at once; a signal handler raises it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Handlers of the signals that ask for an end, installed for a ``with`` block of this process.

    While :attr:`may_wind_down` is True, the first SIGTERM, SIGUSR1 or SIGUSR2 asks for an orderly end: the job saves
    and ends at a boundary between iterations. Any other signal raises :class:`Stopped`. Signals that were ignored when
    this process started (SIGHUP under nohup) stay ignored.

    The exception may not reach the caller. Python drops exceptions that are raised in finalizers and in callbacks of
    the garbage collector, and the handler raises nothing during an import. So the caller also calls :meth:`check`
    after imports and in its loops.
    """

    def __init__(self) -> None:
        self.may_wind_down = False
        """True if the next SIGTERM, SIGUSR1 or SIGUSR2 asks for an orderly end.

        The caller sets it once the job can end orderly; the signal handler resets it.
        """
        self.asked_by: int | None = None
        """Number of the signal that asked for an orderly end; None if no signal did, or the caller has acted on it."""
        self._stopped_by: int | None = None
        self.asked_at = -float("inf")
        """Monotonic time in seconds of the last signal that asked for an orderly end."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise :class:`Stopped` if a signal has asked the job to end at once."""
        if self._stopped_by is not None:
            self._stop(self._stopped_by)

    def _stop(self, number: int) -> NoReturn:
        for asking in END_SIGNALS:  # The job ends now, and further signals must not interrupt its end.
            signal.signal(asking, signal.SIG_IGN)
        raise Stopped(number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.may_wind_down and number in WIND_DOWN_SIGNALS:
            self.may_wind_down, self.asked_by = False, number
            self.asked_at = time.monotonic()
            return
        if number in WIND_DOWN_SIGNALS and time.monotonic() - self.asked_at < REPEAT_S:
            return
        self._stopped_by = number
        if not is_importing(frame):
            self._stop(number)
