"""Keys that the user presses while a command shows a live display. They take effect without Enter."""

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

    Without a terminal :meth:`wait` only sleeps. If the terminal closes during a call, that call returns at once.
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
        except (OSError, ValueError, termios.error):  # no standard input, or a closed terminal
            self._terminal = None
        return self

    def wait(self, seconds: float) -> str:
        """Wait at most ``seconds`` for a key, and return the key. Return an empty string if no key was pressed."""
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
        if not key:  # select() reports a closed terminal as ready, and reading it returns nothing
            self._terminal = None
        return key.decode(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            with suppress(termios.error):  # the terminal may be closed
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
