"""Times on a command line: a number of seconds, or a number with its unit."""

from __future__ import annotations

import argparse
import math
import re

UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
METAVAR = "TIME"
"""Name of such a value in help texts."""
_NUMBER_AND_UNIT = re.compile(rf"(.*?)\s*({'|'.join(sorted(UNITS_S, key=len, reverse=True))})?", re.DOTALL)


def seconds(text: str) -> float:
    """Return the seconds of ``90``, ``1.5h``, ``30m``, ``2.5s``, ``200ms``, ``2d`` or ``inf``, as the type of a flag.

    Raises:
        argparse.ArgumentTypeError: the text is none of these.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    assert match is not None, "any text is something before an optional unit"
    try:
        return float(match[1]) * UNITS_S[match[2] or "s"]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; needs seconds, or a number with {', '.join(UNITS_S)}, as 1.5h"
        ) from None


def span(value_s: float) -> str:
    """Return a duration for people to read: three digits and the unit that suits it."""
    if not math.isfinite(value_s):
        return "never"
    if value_s < 60:
        return f"{value_s:.3g} s"
    if value_s < 3600:
        return f"{value_s / 60:.3g} min"
    return f"{value_s / 3600:.3g} h" if value_s < 3.6e6 else f"{value_s / 3600:,.0f} h"
