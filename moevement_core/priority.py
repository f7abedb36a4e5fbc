"""Priority of threads that work beside training, where processors are fewer than threads that want them."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

NICENESS = 5
"""Of such a thread: where it wants the same processor as a training thread, it has a quarter of its time. With 10, a
tenth, the newest gradients came to peers too late on a busy host, and a redo repeated iterations."""


def let_training_go_first() -> None:
    """Lower the priority of the calling thread, and of threads that it will start.

    Only Linux has a priority for each thread; elsewhere this does nothing. It cannot be undone without privileges.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may refuse it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
