"""Quiet iterations, in which digests and sends pause, so that their cost for training can be measured.

A quiet iteration captures its snapshot like any other, because later its state is gone. The digests and sends of that
snapshot follow in the next iterations.
"""

from __future__ import annotations

from bisect import bisect_right

WARM_UP = 6
"""Number of iterations of a job before the first quiet one, because the first iterations compile and allocate."""
_SPACINGS = ((0, 4), (64, 8), (256, 16))
"""Pairs of a job's age in iterations and the distance of quiet iterations from then on. Quiet iterations are frequent
until W is known."""


def spacing(iteration: int, began_at: int) -> int:
    """Return the distance of quiet iterations at ``iteration`` of a job that began from ``began_at``."""
    ages = [age for age, _ in _SPACINGS]
    return _SPACINGS[bisect_right(ages, max(0, iteration - began_at)) - 1][1]


def is_quiet(iteration: int, began_at: int) -> bool:
    """Return True if ``iteration`` is quiet.

    The result depends on the arguments only, so all ranks, and also replacements, agree without communication.

    Args:
        iteration: number of the iteration, from 1.
        began_at: iteration whose state the job began from.
    """
    age = iteration - began_at
    return age >= WARM_UP and (age - WARM_UP) % spacing(iteration, began_at) == 0
