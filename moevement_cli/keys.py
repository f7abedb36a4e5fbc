"""Keys that are pressed while a command shows something, without Enter."""

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
    """Keyboard of the terminal that standard input is; a context manager that puts it back as it was.

    Without a terminal :meth:`wait` only waits. Where the terminal goes away it returns at once, one time.
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
        if not key:  # the terminal was closed: it is ready for ever
            self._terminal = None
        return key.decode(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            with suppress(termios.error):  # it is gone
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
