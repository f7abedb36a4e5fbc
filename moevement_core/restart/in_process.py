"""Entry to restarts in place, which follow every failure in the surviving processes and in spares.

:mod:`moevement_core.restart.restarts` runs the generations of a job. It needs nvidia-resiliency-ext, and is imported
only in jobs with spares, so that all other jobs run without that library.
"""

from __future__ import annotations

import os
from typing import Any

from moevement_core.restart.training import Training
from moevement_core.util.environment import MEMBER_ENV
from moevement_core.util.extras import require


def is_restarted_in_process() -> bool:
    """Return True if this process is a member of a job with spares, which goes on after failures."""
    return MEMBER_ENV in os.environ


def run_through_failures(training: Training) -> Any:
    """Run ``training`` to the end of the job, with a restart in place after every failure.

    Returns:
        The result of :meth:`Training.enter` in the last generation.

    Raises:
        MissingPackage: nvidia-resiliency-ext, which interrupts ranks, is not installed.
        SystemExit: the job ends by a planned exit of the script, or because it cannot go on.
    """
    global _was_entered
    _was_entered = True
    require("nvidia_resiliency_ext", "a job with spares")
    from moevement_core.restart.restarts import Restarts

    return Restarts(training).run()


_was_entered = False


def was_entered() -> bool:
    """Return True if this process has called :func:`run_through_failures`."""
    return _was_entered
