"""Numbers at the ends of a range: the last ones inside and the first ones outside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.util.numbers import Range

BELOW_ONE = Range(0.0, math.nextafter(1.0, 0.0))
"""Range from 0, included, to 1, excluded."""
PART = Range(math.nextafter(0.0, 1.0), 1.0)
"""Range from 0, excluded, to 1, included."""
WITHIN_ONE = Range(math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0))
"""Range from 0 to 1, both excluded."""
NO_WHOLE_NUMBER = ("x", "1.5", "nan", "")
NO_NUMBER = ("x", "")


@dataclass(frozen=True)
class Edges:
    """Numbers that a test tries: accepted ones inside a range, and refused ones outside."""

    inside: tuple[float, ...]
    outside: tuple[float, ...]


def edges(bounds: Range, *, is_whole: bool) -> Edges:
    """Return the numbers on both sides of the ends of a range, NaN, and the infinities.

    Args:
        bounds: the range.
        is_whole: True to try only whole numbers, because the parser refuses all others.
    """
    if is_whole:
        low, high = int(bounds.least), int(bounds.most) if math.isfinite(bounds.most) else None
        return Edges((low, low + 1 if high is None else high), (low - 1, *(() if high is None else (high + 1,))))
    first = math.nextafter(bounds.least, math.inf) if bounds.is_open else bounds.least
    inside = [first, bounds.most if math.isfinite(bounds.most) else bounds.least + 1.0]
    outside = [math.nan, -math.inf, math.nextafter(first, -math.inf)]
    if math.isfinite(bounds.most):
        outside.append(math.nextafter(bounds.most, math.inf))
    (inside if bounds.or_infinite else outside).append(math.inf)
    return Edges(tuple(inside), tuple(outside))
