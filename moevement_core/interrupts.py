"""Ctrl-C ends a command in one line, whatever it interrupts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from moevement_core.exit_codes import INTERRUPTED

_DROPPED_S = 0.1
_LINE = "moevement: interrupted"


class _Interrupts:
    """The handler of SIGINT, and what becomes of a KeyboardInterrupt that Python drops."""

    def __init__(self, *, process_ends: bool) -> None:
        self.has_come = False
        self._process_ends = process_ends
        self._before: Any = signal.default_int_handler
        self._unraisable = sys.unraisablehook

    def take(self) -> None:
        """Begin to handle SIGINT."""
        self._before = signal.signal(signal.SIGINT, self._raise)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._dropped

    def give_back(self) -> None:
        """Stop to; where the process ends, nothing more of it is interrupted."""
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._process_ends else self._before)
        if not self._process_ends:
            sys.unraisablehook = self._unraisable

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if self._process_ends and is_importing(frame):
            os.write(2, f"{_LINE}\n".encode())
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    def _dropped(self, what: Any) -> None:
        """Come again: a finalizer or a callback was interrupted, from which nothing is raised."""
        if not isinstance(what.exc_value, KeyboardInterrupt):
            self._unraisable(what)
            return
        again = threading.Timer(_DROPPED_S, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()


def is_importing(frame: FrameType | None) -> bool:
    """Whether ``frame``, or what has called it, imports a module.

    No exception belongs there: a compiled module aborts the process, or is left half made, and what tries an import and
    goes on without it takes the interruption for a module that is missing.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def ends_in_one_line(*, process_ends: bool) -> Iterator[None]:
    """Turn SIGINT into "moevement: interrupted" and :data:`INTERRUPTED`.

    What it interrupts need not end with KeyboardInterrupt: somebody may catch it, and fail in another way for it. Who
    catches it and comes to an end has ended as it wanted to (``moevement top``). Where SIGINT is ignored or handled
    already (``nohup``, a thread, a caller's own), that stays.

    Args:
        process_ends: the process ends after the ``with`` block, and ignores SIGINT from then on. It ends at once where
            it imports something, which is before it has made anything.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupts = _Interrupts(process_ends=process_ends)
    try:
        interrupts.take()
        yield
    except BaseException:
        if not interrupts.has_come:
            raise
        interrupts.give_back()
        print(_LINE, file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        interrupts.give_back()
