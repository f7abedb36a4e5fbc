"""Keys pressed while a command shows something. The user does not have to press Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from contextlib import suppress
from types import TracebackType
from typing import Any


class Keys:
    """Keyboard of the terminal at standard input, as a context manager that restores the terminal's mode.

    Without a terminal :meth:`wait` only waits. If the terminal goes away, it returns at once, one time.
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
        except (OSError, ValueError, termios.error):  # no standard input, or the terminal has gone
            self._terminal = None
        return self

    def wait(self, seconds: float) -> str:
        """Wait for a key, and return it. An empty string means that ``seconds`` are over."""
        if self._terminal is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._terminal], [], [], seconds)
        if not ready:
            return ""
        try:
            key = os.read(self._terminal, 1)
        except OSError:
            key = b""
        if not key:  # a closed terminal is always ready
            self._terminal = None
        return key.decode(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            with suppress(termios.error):  # the terminal has gone
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
