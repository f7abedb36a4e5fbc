"""Questions to a disk that may never answer: a mount that has gone away blocks whoever looks at it, for ever."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

_STEP_S = 0.1
"""Seconds of one wait: a main thread that runs nothing for long counts as hanging."""


def within[T](seconds: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, executed on a thread of its own that is left behind if it takes too long.

    Args:
        seconds: how long to wait for it.
        work: must do no harm if it comes to its end later.

    Raises:
        OSError: ``ETIMEDOUT`` if it takes longer; and whatever ``work`` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised where it was asked for
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
