"""Keys that are pressed while a command shows something, without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any


class Keys:
    """Keyboard of the terminal that standard input is; a context manager that puts it back as it was.

    Without a terminal :meth:`wait` only waits.
    """

    def __enter__(self) -> Keys:
        self._terminal: int | None = None
        self._before: list[Any] = []
        try:
            if sys.stdin.isatty():
                number = sys.stdin.fileno()
                self._before = termios.tcgetattr(number)
                tty.setcbreak(number)
                self._terminal = number
        except (OSError, ValueError, termios.error):  # no standard input, or a terminal that is gone
            self._terminal = None
        return self

    def wait(self, seconds: float) -> str:
        """Wait for a key; return it, or an empty string when ``seconds`` are over."""
        deadline = time.monotonic() + seconds
        if self._terminal is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return ""
        key = os.read(self._terminal, 1).decode(errors="replace")
        if not key:  # the terminal was closed: it is ready for ever
            time.sleep(max(0.0, deadline - time.monotonic()))
        return key

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
