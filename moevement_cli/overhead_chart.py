"""Chart of a run's overhead of saving: a bar of its parts, with the percentages as text."""

from __future__ import annotations

from moevement_cli.elements import Element, element
from moevement_cli.part_bar import BarPart, part_bar
from moevement_cli.saving_costs import NAMES, interval, percent
from moevement_core.overhead.estimate import CONFIDENCE
from moevement_core.overhead.fields import PARTS, RecordedOverhead

COLORS = dict(zip(PARTS, ("#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#d55e00"), strict=True))
"""Color by part. The colors suit readers with color vision deficiency (Okabe and Ito)."""


def overhead_chart(overhead: RecordedOverhead, full_width: float) -> Element:
    """Return a figure of ``overhead``. A part that is not positive is shown as a number, without a bar.

    Args:
        overhead: measured overhead of one run.
        full_width: share of training that fills the width of the page, the same for all runs of the page.
    """
    parts = [
        BarPart(name=NAMES[part], value=share, shown=percent(share).rstrip("%"), unit="%", color=COLORS[part])
        for part, share in overhead.parts.items()
    ]
    return element(
        "figure",
        element(
            "p", element("b", f"{percent(overhead.share)} of training: "),
            f"{CONFIDENCE:.0%} interval {interval(overhead)}",
            "" if overhead.allowed is None else f"; {percent(overhead.allowed)} allowed",
        ),
        *part_bar(parts, full_width), class_="overhead",
    )  # fmt: skip


def bar_share(overhead: RecordedOverhead) -> float:
    """Return the share of training that the bar shows: the sum of the positive parts."""
    return sum(max(0.0, share) for share in overhead.parts.values())
