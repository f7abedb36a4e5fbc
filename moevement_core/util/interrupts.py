"""End of a command by Ctrl-C, no matter which code the signal interrupts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_AGAIN_S = 0.1
"""Seconds after which the handler tries again to raise KeyboardInterrupt."""


def is_importing(frame: FrameType | None) -> bool:
    """Return True if ``frame`` or one of its callers is importing a module.

    An exception during an import would do harm. A compiled module would abort the process or stay half initialized.
    Code that tries an optional import would treat the interruption as a missing module.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class _Interrupts:
    """Handler that raises KeyboardInterrupt at SIGINT, and tries again later if that has no effect.

    During an import the handler does not raise. In a finalizer, Python drops the exception. In both cases an alarm
    (SIGALRM) calls the handler again. An alarm serves here and not a thread, because the handler may have interrupted
    the start of a thread, and must then not start another thread. It repeats until the handler raises, because a signal
    just before a blocking call, such as a sleep, runs no Python code until the call returns, or another signal comes.
    """

    def __init__(self) -> None:
        self._before: list[tuple[int, Any]] = []
        self._unraisable = sys.unraisablehook

    def take(self) -> None:
        """Install the handlers of SIGINT and SIGALRM, and the hook for dropped exceptions."""
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._drops
        for number in (signal.SIGALRM, signal.SIGINT):
            self._before.append((number, signal.signal(number, self._interrupt)))

    def restore(self, *, process_ends: bool) -> None:
        """Restore the earlier handlers; if the process ends, ignore SIGINT from now on instead."""
        if process_ends:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = self._unraisable
        for number, handler in self._before:
            if number != signal.SIGINT or not process_ends:
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    def _drops(self, unraisable: Any) -> None:
        """Repeat a KeyboardInterrupt that Python dropped in a finalizer or in a callback of the garbage collector."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        else:
            self._unraisable(unraisable)


@contextmanager
def interruptible(*, process_ends: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, as soon as no module is being imported.

    If code in the ``with`` block turns the KeyboardInterrupt into another error, this function raises KeyboardInterrupt
    all the same. Code in the block may also catch KeyboardInterrupt and continue. The function changes nothing outside
    the main thread, if SIGINT is ignored (``nohup``), or if the caller has set a handler.

    Args:
        process_ends: True if the process ends after the ``with`` block. From the end of the block on, it ignores
            SIGINT.

    Raises:
        KeyboardInterrupt: SIGINT arrived.
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
        interrupts.restore(process_ends=process_ends)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT, and an alarm that repeats it, back until the ``with`` block ends; only in the main thread.

    A mask of signals does not suffice: another thread of the process may take the signal, and Python then calls its
    handler in the main thread all the same.
    """
    arrived: list[int] = []
    replaced: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGALRM):
            if callable(handler := signal.getsignal(number)):
                replaced[number] = handler
                signal.signal(number, lambda taken, frame: arrived.append(taken))
    try:
        yield
    finally:
        for held, handler in replaced.items():
            signal.signal(held, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Return True if ``error`` or one of its causes or contexts is a KeyboardInterrupt."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
