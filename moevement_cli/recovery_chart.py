"""Recoveries as timelines by part, as SVG: a bar each, from the failure on, all to one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moevement_cli.elements import Element, element
from moevement_cli.line_chart import FONT_PX, tick_step
from moevement_core.recovery.account import PARTS

WIDTH, LEFT, RIGHT = 960.0, 10.0, 70.0
ROW, BAR = 46.0, 16.0
"""Height of a recovery, and of its bar below the words."""
COLORS = dict(
    zip(PARTS, ("#8c8c8c", "#e69f00", "#d55e00", "#cc79a7", "#0072b2", "#56b4e9", "#009e73"), strict=True)
)  # fmt: skip
"""By part; told apart also by those who see few colors (Okabe and Ito)."""


UNKNOWN = "#000000"
"""Of a part that another version had."""


def recovery_chart(recoveries: Sequence[Mapping[str, Any]]) -> Element:
    """A figure of all ``recoveries``, events of the kind ``failure``, with a legend."""
    longest = max(recovery["total_s"] for recovery in recoveries) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = ROW * len(recoveries) + 28
    parts = [*_axis(longest, scale, height)]
    for number, recovery in enumerate(recoveries):
        parts += _row(recovery, ROW * number, scale)
    drawn = element(
        "svg", element("title", "recoveries by part"), *parts, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img",
        aria_label="recoveries by part",
    )  # fmt: skip
    return element("figure", drawn, _legend(recoveries), class_="recoveries")


def _axis(longest: float, scale: float, height: float) -> list[Element]:
    step, drawn = tick_step(0.0, longest), list[Element]()
    for number in range(int(longest / step) + 1):
        x = LEFT + number * step * scale
        drawn.append(element("line", x1=x, x2=x, y1=0, y2=height - 22, class_="grid"))
        label = f"{number * step:,.6g}" + (" s" if not number else "")
        drawn.append(element("text", label, x=x, y=height - 6, class_="x tick" if number else "first tick"))
    return drawn


def _row(recovery: Mapping[str, Any], top: float, scale: float) -> list[Element]:
    who = "; ".join([*recovery.get("earlier", ()), *recovery["failures"]]) or "all ranks restarted"
    words = f"{recovery['generation']}: {who if len(who) < 120 else who[:117] + '...'}"
    bars, x = [element("text", words, x=LEFT, y=top + FONT_PX + 4, class_="who")], LEFT
    for part, seconds in recovery["parts"].items():
        width = seconds * scale
        bar = element("rect", x=x, y=top + 21, width=width, height=BAR, fill=COLORS.get(part, UNKNOWN))
        bars.append(element("g", element("title", f"{part}: {seconds:.3f} s"), bar, class_="part"))
        x += width
    bars.append(element("text", f"{recovery['total_s']:.2f} s", x=x + 6, y=top + 33, class_="total"))
    return bars


def _legend(recoveries: Sequence[Mapping[str, Any]]) -> Element:
    parts = dict.fromkeys(part for recovery in recoveries for part in recovery["parts"])
    return element(
        "ul",
        *(
            element(
                "li", element("span", style=f"border-top: 10px solid {COLORS.get(part, UNKNOWN)}", class_="swatch"),
                f" {part}",
            )
            for part in parts
        ),
        class_="legend",
    )  # fmt: skip
