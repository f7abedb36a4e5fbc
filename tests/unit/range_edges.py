"""The numbers at the ends of a range: the last ones inside of it, and the first ones outside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.util.numbers import Range

BELOW_ONE = Range(0.0, math.nextafter(1.0, 0.0))
"""From 0 on, less than 1."""
PART = Range(math.nextafter(0.0, 1.0), 1.0)
"""More than 0, up to 1."""
WITHIN_ONE = Range(math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0))
"""More than 0, less than 1."""
NO_WHOLE_NUMBER = ("x", "1.5", "nan", "")
NO_NUMBER = ("x", "")


@dataclass(frozen=True)
class Edges:
    """Numbers to try: those that are taken, and those that are refused."""

    inside: tuple[float, ...]
    outside: tuple[float, ...]


def edges(its: Range, *, is_whole: bool) -> Edges:
    """Return the neighbours of both ends of a range, NaN, and the infinities.

    Args:
        its: the range.
        is_whole: whether only whole numbers are tried; the parser refuses all others.
    """
    if is_whole:
        low, high = int(its.least), int(its.most) if math.isfinite(its.most) else None
        return Edges((low, low + 1 if high is None else high), (low - 1, *(() if high is None else (high + 1,))))
    first = math.nextafter(its.least, math.inf) if its.is_open else its.least
    inside = [first, its.most if math.isfinite(its.most) else its.least + 1.0]
    outside = [math.nan, -math.inf, math.nextafter(first, -math.inf)]
    if math.isfinite(its.most):
        outside.append(math.nextafter(its.most, math.inf))
    (inside if its.or_infinite else outside).append(math.inf)
    return Edges(tuple(inside), tuple(outside))
