"""Measurement of how the time of a function grows with the size of its input."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(function: Callable[[int], object], size: int, repeats: int = 3) -> float:
    """Return the ratio of processor times for ``4 * size`` and ``size``: 4 if time is linear, 16 if it is quadratic.

    Args:
        function: function to measure, called with a size.
        size: large enough that one call takes milliseconds.
        repeats: number of calls with each size. The quickest call is used, because other load only adds to its time.
    """

    def least_s(measured: int) -> float:
        times = []
        for _ in range(repeats):
            began = time.process_time()
            function(measured)
            times.append(time.process_time() - began)
        return min(times)

    return least_s(4 * size) / least_s(size)
