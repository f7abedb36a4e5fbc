"""Gate that a training thread may wait in although a restart's exception may reach it there at any moment.

``threading.Condition`` and ``threading.Event`` enter their lock in Python code: an exception that is posted from
outside while the main thread waits for that lock is raised when it has it, before any ``with`` block that would give it
back. Whoever needs the lock next waits for ever. A plain ``threading.Lock`` is entered and left in C, where no
exception can come between.
"""

from __future__ import annotations

import threading


class Gate:
    """A gate that opens once; any thread may open it, and any number of threads may wait for that."""

    def __init__(self) -> None:
        self.is_open = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        """Let all go on that wait, and whoever comes later; called by one thread at a time."""
        if not self.is_open:
            self.is_open = True
            self._closed.release()

    def wait(self) -> None:
        """Block until the gate is open."""
        if not self.is_open:
            with self._closed:
                pass
