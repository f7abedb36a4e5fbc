"""Intervals of dense checkpoints that hide a checkpoint behind training, or keep its cost below a cap."""

from __future__ import annotations

import math

from moevement_core.errors import WindowError

STEP = 2
"""Iterations added to the interval while a checkpoint costs more than its cap (CheckFreq's public implementation)."""


def hidden_interval(checkpoint_s: float, overhead_s: float, iteration_s: float) -> int:
    """Return the fewest iterations in which a checkpoint ends before the next one begins.

    It is CheckFreq's ``max(1, ceil((t_full - overhead) / t_iter))``.

    Args:
        checkpoint_s: t_full, seconds from the beginning of the copy until the checkpoint has reached its destination.
        overhead_s: seconds of it that delay training.
        iteration_s: t_iter, seconds of an iteration without saving.

    Raises:
        WindowError: the iteration time is not positive, or a time is not finite.
    """
    if not (math.isfinite(iteration_s) and iteration_s > 0):
        raise WindowError(f"iteration time of {iteration_s} s; needs a positive number")
    if not (math.isfinite(checkpoint_s) and math.isfinite(overhead_s)):
        raise WindowError(f"a checkpoint of {checkpoint_s} s that costs {overhead_s} s; needs finite numbers")
    return max(1, math.ceil((checkpoint_s - overhead_s) / iteration_s))


def tuned_interval(now: int, hidden: int, overhead_s: float, iteration_s: float, cap: float) -> int:
    """Return the interval after a monitored one: longer if checkpoints cost too much, shorter if the cap allows it.

    Args:
        now: monitored interval, iterations.
        hidden: result of :func:`hidden_interval` for the measured times; the least result of this function.
        overhead_s: seconds by which the checkpoint of the interval delayed training.
        iteration_s: seconds of an iteration without saving.
        cap: share of training time that checkpoints may cost.
    """
    if overhead_s > cap * now * iteration_s:
        return max(now + STEP, hidden)
    # The shorter interval must keep to the cap with a margin; otherwise measurements would move it to and fro.
    if now > 1 and overhead_s <= 0.8 * cap * (now - 1) * iteration_s:
        return max(now - 1, hidden)
    return max(now, hidden)
