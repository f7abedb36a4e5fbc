"""Interval between dense checkpoints: long enough for a checkpoint to end, and for a cost below a cap."""

from __future__ import annotations

import math

from moevement_core.errors import WindowError

STEP = 2
"""Iterations added to the interval while a checkpoint costs more than its cap (CheckFreq's public implementation)."""


def hidden_interval(checkpoint_s: float, overhead_s: float, iteration_s: float) -> int:
    """Return the shortest interval, in iterations, in which a checkpoint ends before the next one begins.

    The formula is CheckFreq's ``max(1, ceil((t_full - overhead) / t_iter))``.

    Args:
        checkpoint_s: t_full, seconds from the beginning of the copy until the checkpoint has reached its destination.
        overhead_s: part of ``checkpoint_s`` that delays training.
        iteration_s: t_iter, seconds of an iteration without saving.

    Raises:
        WindowError: the iteration time is not positive, or a time is not finite.
    """
    if not (math.isfinite(iteration_s) and iteration_s > 0):
        raise WindowError(f"iteration time is {iteration_s} s; needs a positive number")
    if not (math.isfinite(checkpoint_s) and math.isfinite(overhead_s)):
        raise WindowError(f"checkpoint time is {checkpoint_s} s and overhead is {overhead_s} s; both must be finite")
    return max(1, math.ceil((checkpoint_s - overhead_s) / iteration_s))


def tuned_interval(now: int, hidden: int, overhead_s: float, iteration_s: float, cap: float) -> int:
    """Return the next interval: longer if checkpoints cost too much, shorter if the cap allows it.

    Args:
        now: present interval, iterations.
        hidden: result of :func:`hidden_interval` for the measured times. This function never returns less.
        overhead_s: seconds by which the checkpoint of the interval delayed training.
        iteration_s: seconds of an iteration without saving.
        cap: share of training time that checkpoints may cost.
    """
    if overhead_s > cap * now * iteration_s:
        return max(now + STEP, hidden)
    # A shorter interval must stay below the cap with a margin. Otherwise noise would change the interval all the time.
    if now > 1 and overhead_s <= 0.8 * cap * (now - 1) * iteration_s:
        return max(now - 1, hidden)
    return max(now, hidden)
