"""Measurement of how processor time grows with a size, without a limit in seconds."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

MOST_GROWTH = 8.0
"""Largest accepted ratio of the times for ``4 * size`` and ``size``. Linear time has 4, and quadratic time has 16."""
ATTEMPTS = 12


def assert_linear(prepared: Callable[[int], Callable[[], object]], size: int, repeats: int = 3) -> None:
    """Check that work grows no faster than a size, except for fixed costs and caches.

    Other work on the machine changes processor times, too. So the check measures a ratio that is too large again.

    Args:
        prepared: function that makes the arguments for a size, and returns the work as a function without arguments.
        size: large enough that the work takes a millisecond or more.
        repeats: number of calls with each size. The quickest call is used, because other load only adds to its time.
    """
    few, many = prepared(size), prepared(4 * size)
    ratios: list[float] = []
    while not ratios or (min(ratios) >= MOST_GROWTH and len(ratios) < ATTEMPTS):
        ratios.append(_least_s(many, repeats) / max(_least_s(few, repeats), 1e-6))
    assert min(ratios) < MOST_GROWTH, ratios


def _least_s(work: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of a call, without the time to collect garbage.

    A full collection visits every object of the process, and larger work starts more collections. So with garbage
    collection, the ratio of two times would depend on what the tests before had left in memory.
    """
    return min(timeit.repeat(work, timer=time.process_time, repeat=repeats, number=1))
