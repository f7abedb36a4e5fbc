"""Ctrl-C ends a command, whatever it interrupts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_AGAIN_S = 0.1


def is_importing(frame: FrameType | None) -> bool:
    """Return whether ``frame``, or one of its callers, imports a module.

    No exception belongs there: a compiled module aborts the process, or is left half made, and what tries an import and
    goes on without it takes the interruption for a module that is missing.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class _Interrupts:
    """SIGINT as KeyboardInterrupt, which comes again where it does not belong or where Python drops it.

    By an alarm, since a thread cannot be started in a signal's handler: it may have interrupted the start of another.
    """

    def __init__(self) -> None:
        self._before: list[tuple[int, Any]] = []
        self._unraisable = sys.unraisablehook

    def take(self) -> None:
        """Begin to handle it."""
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._drops
        for number in (signal.SIGALRM, signal.SIGINT):
            self._before.append((number, signal.signal(number, self._interrupt)))

    def give_back(self, *, process_ends: bool) -> None:
        """Stop to; where the process ends, nothing more of it is interrupted."""
        if process_ends:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = self._unraisable
        for number, handler in self._before:
            if number != signal.SIGINT or not process_ends:
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            raise KeyboardInterrupt

    def _drops(self, what: Any) -> None:
        """Nothing can be raised from a finalizer, or from a callback of the garbage collector."""
        if isinstance(what.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            self._unraisable(what)


@contextmanager
def interruptible(*, process_ends: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, once no module is being imported.

    Also from the ``with`` block, where what was interrupted has failed in another way because of it. Who catches it
    and goes on does. Where SIGINT is ignored or handled already (``nohup``, a thread, a caller's own), that stays.

    Args:
        process_ends: the process ends after the ``with`` block, and ignores SIGINT from then on.

    Raises:
        KeyboardInterrupt: it came.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupts = _Interrupts()
    try:
        interrupts.take()
        yield
    except Exception as error:
        if _is_of_interrupt(error):
            raise KeyboardInterrupt from None
        raise
    finally:
        interrupts.give_back(process_ends=process_ends)


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Return whether an interruption led to an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
