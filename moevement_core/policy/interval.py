"""Intervals of dense checkpoints: those that hide a checkpoint, or keep its cost below a cap."""

from __future__ import annotations

import math

from moevement_core.errors import WindowError

STEP = 2
"""Iterations that are added while a checkpoint costs more than its cap (CheckFreq's public implementation)."""


def hidden_interval(checkpoint_s: float, overhead_s: float, iteration_s: float) -> int:
    """The fewest iterations beside which a checkpoint is over before the next one begins.

    That is ``max(1, ceil((t_full - overhead) / t_iter))`` of CheckFreq.

    Args:
        checkpoint_s: t_full, seconds from the beginning of the copy until the checkpoint is where it has to be.
        overhead_s: seconds of it by which training is delayed.
        iteration_s: t_iter, of an iteration beside which nothing is saved.

    Raises:
        WindowError: no iteration time, or a time that is no number.
    """
    if not (math.isfinite(iteration_s) and iteration_s > 0):
        raise WindowError(f"iteration time of {iteration_s} s; needs a positive number")
    if not (math.isfinite(checkpoint_s) and math.isfinite(overhead_s)):
        raise WindowError(f"a checkpoint of {checkpoint_s} s that costs {overhead_s} s; needs finite numbers")
    return max(1, math.ceil((checkpoint_s - overhead_s) / iteration_s))


def tuned_interval(now: int, hidden: int, overhead_s: float, iteration_s: float, cap: float) -> int:
    """The interval after one that was monitored: longer while checkpoints cost too much, shorter where they need not.

    Args:
        now: the interval that was monitored, iterations.
        hidden: what :func:`hidden_interval` gives for what was measured in it; never less than this.
        overhead_s: seconds by which its checkpoint delayed training.
        iteration_s: of an iteration beside which nothing is saved.
        cap: the share of training time that checkpoints may cost.
    """
    if overhead_s > cap * now * iteration_s:
        return max(now + STEP, hidden)
    # One less only where that keeps to the cap with room to spare, or measurements would move it to and fro.
    if now > 1 and overhead_s <= 0.8 * cap * (now - 1) * iteration_s:
        return max(now - 1, hidden)
    return max(now, hidden)
