"""Signals that ask a launcher, a task or a coordinator to end its job: in order, or at once."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, NoReturn

from moevement_core.interrupts import is_importing
from moevement_core.launching.children import ASKING, WINDING_DOWN

REPEAT_S = 1.0
"""Signals that ask for an orderly end within this time of the first one are that one again: ``timeout`` sends it to its
command and then to the group of both, batch systems to each process and by way of ``srun``."""


class Stopped(BaseException):
    """Somebody wants the job to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Signals that ask to end, in a ``with`` block; here and not in processes forked from here.

    The first of those that come before a machine is taken away (SIGTERM, SIGUSR1, SIGUSR2) asks a job that can to end
    in order, at a boundary between iterations and with everything saved; every other one is raised as an exception.
    What was ignored when this process was started (SIGHUP under nohup) stays so.

    Python drops an exception that comes up in a finalizer or a callback of the garbage collector, and none is raised in
    an import, so whoever has imported, or waits in a loop, also calls :meth:`check`.
    """

    def __init__(self) -> None:
        self.may_wind_down = False
        self.asked_by: int | None = None
        """The signal that asked the job to end in order; until that is taken up."""
        self._stopped_by: int | None = None
        self._asked_at = -float("inf")
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in ASKING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises :class:`Stopped` if a signal has asked to end at once."""
        if self._stopped_by is not None:
            self._stop(self._stopped_by)

    def _stop(self, number: int) -> NoReturn:
        for asking in ASKING:  # once is enough: what comes now is the end
            signal.signal(asking, signal.SIG_IGN)
        raise Stopped(number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.may_wind_down and number in WINDING_DOWN:
            self.may_wind_down, self.asked_by = False, number
            self._asked_at = time.monotonic()
            return
        if number in WINDING_DOWN and time.monotonic() - self._asked_at < REPEAT_S:
            return
        self._stopped_by = number
        if not is_importing(frame):
            self._stop(number)
