"""Priority of background threads on hosts with fewer processors than busy threads."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

LEAST = 19
"""Largest niceness of Linux, which is the lowest priority."""
NICENESS = 5
"""Niceness that a background thread adds to its own: next to a training thread on one processor it gets a quarter of
the time. With 10 it got a tenth; then the newest gradients reached peers too late on a busy host, and a redo
re-executed iterations."""


def lower_priority() -> None:
    """Lower the priority of the calling thread and of the threads that it starts later.

    Other systems than Linux have no priority for each thread; there the function does nothing. A process without
    privileges cannot undo the change.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # A sandbox may refuse the call.
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(LEAST, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
