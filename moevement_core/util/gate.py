"""Gate at which the training thread can wait safely, even if the exception of a restart arrives during the wait.

``threading.Condition`` and ``threading.Event`` take their lock in Python code. A restart raises its exception in the
main thread from another thread. That may happen right after the main thread has taken the lock, and before it enters
the ``with`` block that would release the lock. The next thread that needs the lock then waits forever. A plain
``threading.Lock`` is taken and released in C code, where Python raises no exception.
"""

from __future__ import annotations

import threading


class Gate:
    """Gate that opens once and stays open; any number of threads may wait for it."""

    def __init__(self) -> None:
        self.is_open = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        """Open the gate for all present and later waiters.

        Any thread may call the method, but not two threads at the same time.
        """
        if not self.is_open:
            self.is_open = True
            self._closed.release()

    def wait(self) -> None:
        """Block until the gate is open."""
        if not self.is_open:
            with self._closed:
                pass
