"""Gate at which the training thread can wait safely, even if the exception of a restart arrives during the wait.

``threading.Condition`` and ``threading.Event`` have a lock, which they take in Python code. A restart raises an
exception in the main thread, at any bytecode. The main thread may just have taken the lock, but not yet entered the
``with`` block that would release it. Then the lock is never released, and the next thread that needs it waits forever.
A plain ``threading.Lock``, as in this class, is taken and released in C code, where Python raises no exception.
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
