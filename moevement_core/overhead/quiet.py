"""Quiet iterations: digests and sends pause beside them, so that what these cost training can be measured.

A snapshot is captured in a quiet iteration as in any other, for it cannot be captured later. Its digest is made, and
its bytes leave, in the iterations that follow.
"""

from __future__ import annotations

from bisect import bisect_right

WARM_UP = 6
"""Iterations of a job before the first quiet one: the first ones compile and allocate."""
_SPACINGS = ((0, 4), (64, 8), (256, 16))
"""Age of the job in iterations, and from then on the distance of quiet iterations: they are
frequent until W is known.
"""


def spacing(iteration: int, began_at: int) -> int:
    """Return every how many iterations one is quiet at ``iteration`` of a job that began from ``began_at``."""
    ages = [age for age, _ in _SPACINGS]
    return _SPACINGS[bisect_right(ages, max(0, iteration - began_at)) - 1][1]


def is_quiet(iteration: int, began_at: int) -> bool:
    """Return whether ``iteration`` is quiet.

    The answer depends on the arguments alone, so all ranks have the same one, replacements among them, and ask nobody.

    Args:
        iteration: the iteration, counted from 1.
        began_at: the iteration whose state the job began from.
    """
    age = iteration - began_at
    return age >= WARM_UP and (age - WARM_UP) % spacing(iteration, began_at) == 0
