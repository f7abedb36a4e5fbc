"""Bar that shows the parts of a sum side by side, with a legend below.

Bars are HTML boxes, not SVG. So text in them wraps, and keeps its size when the page becomes narrow. Screen readers
read the legend and skip the bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moevement_cli.elements import Element, element

WHITE_ON = ("#0072b2", "#000000")
"""Colors that are too dark for black numbers on them."""
LEAST_SHARE = 0.07
"""Smallest part that has its number in the bar, as a share of the page's width."""


@dataclass(frozen=True)
class BarPart:
    """Part of a bar. The bar shows only parts with a positive value; the legend shows all."""

    name: str
    value: float
    shown: str
    """Value as text without its unit, as the bar shows it."""
    unit: str
    """Unit that the legend shows after the value."""
    color: str


def part_bar(parts: Sequence[BarPart], full_width: float) -> tuple[Element, Element]:
    """Return the bar and the legend of ``parts``.

    Args:
        parts: parts in their order.
        full_width: sum of values at which the bar is as wide as the page. Bars that a reader compares need the same
            ``full_width``.
    """
    bars = [_bar(part, part.value / full_width) for part in parts if part.value > 0]
    return (
        element("div", *bars, class_="bar", aria_hidden="true"),
        element("ul", *map(_named, parts), class_="legend"),
    )


def _bar(part: BarPart, share: float) -> Element:
    color = "#ffffff" if part.color in WHITE_ON else "#000000"
    look = f"width: {100 * share:.2f}%; background: {part.color}; color: {color}"
    return element("span", part.shown if share >= LEAST_SHARE else "", style=look, title=part.name, class_="part")


def _named(part: BarPart) -> Element:
    swatch = element("span", style=f"border-top: 10px solid {part.color}", class_="swatch")
    return element("li", swatch, f" {part.name} {part.shown}{part.unit}")
