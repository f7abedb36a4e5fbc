"""Automatic end of a process when the process that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal

from moevement_core.util.environment import PARENT_ENV

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends, for whatever reason.

    A new process calls this function first. Without it, a rank would continue to train after the end of its launcher,
    and disturb the next job.
    """
    parent = os.environ.get(PARENT_ENV)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # The parent ended before prctl was called.
        os.kill(os.getpid(), signal.SIGKILL)
