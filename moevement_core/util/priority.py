"""Priority of background threads on hosts with fewer processors than busy threads."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

LEAST = 19
"""Largest niceness of Linux, which is the lowest priority."""
NICENESS = 5
"""Niceness that :func:`lower_priority` adds. If a training thread and a background thread share a processor, the
background thread gets a quarter of the time. With a niceness of 10, the background thread got a tenth. On a busy host,
that was too little: the newest gradients reached peers late, so recoveries by redo had to execute iterations again."""


def lower_priority() -> None:
    """Lower the priority of the calling thread and of the threads that it starts later.

    A process without privileges cannot undo the change. The function does nothing on systems other than Linux, because
    their threads have no priority of their own.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # A sandbox may refuse the call.
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(LEAST, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
