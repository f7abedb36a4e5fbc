"""Times on a command line: a number of seconds, or a number with its unit."""

from __future__ import annotations

import argparse
import math
import re

UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
METAVAR = "TIME"
"""Placeholder for a time in help texts."""
_NUMBER_AND_UNIT = re.compile(rf"(.*?)\s*({'|'.join(sorted(UNITS_S, key=len, reverse=True))})?", re.DOTALL)


def seconds(text: str) -> float:
    """Return the seconds that a text such as ``90``, ``1.5h``, ``30m``, ``2.5s``, ``200ms``, ``2d`` or ``inf`` means.

    Parsers use this function as the type of a flag.

    Raises:
        argparse.ArgumentTypeError: the text is no such time.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    assert match is not None, "every text matches, because the unit is optional"
    try:
        return float(match[1]) * UNITS_S[match[2] or "s"]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; needs seconds, or a number with a unit ({', '.join(UNITS_S)}), such as 1.5h"
        ) from None


def span(value_s: float) -> str:
    """Return a duration as text: at most three digits and a suitable unit. An infinite duration is ``never``."""
    if not math.isfinite(value_s):
        return "never"
    if value_s < 60:
        return f"{value_s:.3g} s"
    if value_s < 3600:
        return f"{value_s / 60:.3g} min"
    return f"{value_s / 3600:.3g} h" if value_s < 3.6e6 else f"{value_s / 3600:,.0f} h"
