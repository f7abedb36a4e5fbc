"""Bounded waits for a disk that may never answer: a thread that accesses a lost mount blocks forever."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

_STEP_S = 0.1
"""Longest wait without a return to Python, in seconds. A longer wait is a series of such waits, because a rank counts
as hung if its main thread executes no bytecode for long."""


def within[T](seconds: float, work: Callable[[], T]) -> T:
    """Run ``work`` on a new thread, wait for it, and return its result; abandon the thread after ``seconds``.

    Args:
        seconds: longest time to wait.
        work: function to run. After a timeout it continues on the abandoned thread, so it must do no harm there.

    Raises:
        OSError: ``ETIMEDOUT`` if ``work`` takes longer. Errors of ``work`` are raised as they are.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised on the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name="moevement-look", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, _STEP_S))
    if errors:
        raise errors[0]
    if not results:
        raise OSError(errno.ETIMEDOUT, f"no answer within {seconds:g} s ({os.strerror(errno.ETIMEDOUT)})")
    return results[0]
