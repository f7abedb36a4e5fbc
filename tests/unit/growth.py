"""How much longer a function takes for four times as much."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(function: Callable[[int], object], size: int, repeats: int = 3) -> float:
    """Return processor time for ``4 * size`` over that for ``size``: 4 where time is linear, 16 where it is quadratic.

    Args:
        function: called with a size.
        size: large enough that one call takes milliseconds.
        repeats: of each size, of which the quickest counts: a busy machine only adds to processor time.
    """

    def least_s(measured: int) -> float:
        times = []
        for _ in range(repeats):
            began = time.process_time()
            function(measured)
            times.append(time.process_time() - began)
        return min(times)

    return least_s(4 * size) / least_s(size)
