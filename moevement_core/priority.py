"""Priority of threads that work beside training, where processors are fewer than threads that want them."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

LEAST = 19
"""The lowest priority that Linux has."""
NICENESS = 5
"""Niceness added to such a thread: where it wants the same processor as a training thread, it gets a quarter of the
time. With 10, a tenth, the newest gradients came to peers too late on a busy host, and a redo repeated iterations.
"""


def let_training_go_first() -> None:
    """Lower the priority of the calling thread, and of threads that it will start.

    Only Linux has a priority for each thread; elsewhere this does nothing. It cannot be undone without privileges.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may refuse it
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(LEAST, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
