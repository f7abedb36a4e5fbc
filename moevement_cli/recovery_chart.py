"""Chart of recoveries. Each recovery has a bar of its parts, with the seconds as text. The bars have a common scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moevement_cli.elements import Element, element
from moevement_cli.part_bar import BarPart, part_bar
from moevement_core.run.account import PARTS
from moevement_core.util.words import spares_words

COLORS = dict(
    zip(PARTS, ("#8c8c8c", "#e69f00", "#d55e00", "#cc79a7", "#0072b2", "#56b4e9", "#009e73"), strict=True)
)  # fmt: skip
"""Color by part. The colors suit readers with color vision deficiency (Okabe and Ito)."""
UNKNOWN = "#000000"
"""Color of a part that this version does not know. Another version recorded it."""
MOST_LETTERS = 120


def recovery_chart(recoveries: Sequence[Mapping[str, Any]]) -> Element:
    """Return a figure of all ``recoveries``, which are events of the kind ``failure``."""
    longest = max(recovery["total_s"] for recovery in recoveries) or 1.0
    return element("figure", *(_recovery(recovery, longest) for recovery in recoveries), class_="recoveries")


def _recovery(recovery: Mapping[str, Any], longest: float) -> Element:
    failures = "; ".join([*recovery.get("earlier", ()), *recovery["failures"]]) or "all ranks restarted"
    words = failures if len(failures) < MOST_LETTERS else f"{failures[: MOST_LETTERS - 3]}..."
    parts = [
        BarPart(name, value=seconds, shown=f"{seconds:.2f}", unit=" s", color=COLORS.get(name, UNKNOWN))
        for name, seconds in recovery["parts"].items()
        if seconds > 0
    ]
    return element(
        "div",
        element("p", element("b", f"Recovery {recovery['generation']}, {recovery['total_s']:.2f} s: "), words),
        *part_bar(parts, longest),
        element(
            "dl", *(element(*item) for name, value in _account(recovery) for item in (("dt", name), ("dd", value)))
        ),
        class_="recovery",
    )


def _account(recovery: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts below a bar: detection, scope, survivors, copies, spares."""
    yield "noticed by", recovery["noticed_by"].removeprefix("by ")
    yield "scope", recovery["scope"]
    if recovery["recovery"] is not None:
        yield "iterations repeated", str(recovery["recovery"]["replayed"])
    yield "survivors", recovery["kept"]
    yield "copies", recovery["copies"]
    yield "spares", spares_words(recovery["spares"], recovery.get("starting", 0))
