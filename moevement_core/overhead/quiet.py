"""Quiet iterations: digests and sends pause in them, so that the cost of saving can be measured.

A snapshot is captured in a quiet iteration like in any other, because its state is gone afterwards. Digests and sends
of that snapshot follow in the next iterations.
"""

from __future__ import annotations

from bisect import bisect_right

WARM_UP = 6
"""Number of iterations of a job before the first quiet one, because the first iterations compile and allocate."""
_SPACINGS = ((0, 4), (64, 8), (256, 16))
"""Pairs: age of a job in iterations, and distance between quiet iterations from that age on. Quiet iterations are
frequent until W is known."""


def spacing(iteration: int, began_at: int) -> int:
    """Return the number of iterations from one pause of digests and sends to the next, around ``iteration``.

    Args:
        iteration: number of an iteration, from 1.
        began_at: iteration whose state the job began from.
    """
    ages = [age for age, _ in _SPACINGS]
    return _SPACINGS[bisect_right(ages, max(0, iteration - began_at)) - 1][1]


def is_quiet(iteration: int, began_at: int) -> bool:
    """Return True if digests and sends pause in ``iteration``.

    The result depends on the arguments only, so all ranks agree without communication, including replacements.

    Args:
        iteration: number of the iteration, from 1.
        began_at: iteration whose state the job began from.
    """
    age = iteration - began_at
    return age >= WARM_UP and (age - WARM_UP) % spacing(iteration, began_at) == 0
