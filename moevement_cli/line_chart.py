"""Lines over iterations, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moevement_cli.elements import Element, element

WIDTH, HEIGHT = 640.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 10.0, 34.0
"""Margins around what is drawn."""
MOST_POINTS = 1200
"""Of a line; of more the least and the greatest of as many as fall on a place are drawn."""
X_TICKS, Y_TICKS = 8, 5
"""About so many."""
HEADROOM = 1.04
FONT_PX = 12.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One of them."""

    label: str
    color: str
    points: Sequence[Point]
    """In the order of x; a y that is no finite number is a gap."""
    is_dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at an x."""

    x: float
    color: str
    text: str


@dataclass(frozen=True)
class Chart:
    """A title, lines, and marks across all of it."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    unit: str = ""
    """Of y, behind the title; with ``bytes`` numbers are in kB, MB, GB or TB."""
    from_zero: bool = True
    x_label: str = "iteration"

    def draw(self) -> Element:
        """A figure with its caption and legend."""
        caption = element("figcaption", self.title + (f", {self._unit_shown}" if self._unit_shown else ""))
        if not self._finite:
            return element("figure", caption, element("p", "nothing was recorded", class_="none"), class_="chart")
        return element("figure", caption, self._svg(), *self._legend(), class_="chart")

    @property
    def _finite(self) -> list[Point]:
        return [point for line in self.lines for point in line.points if math.isfinite(point[1])]

    @property
    def _scale(self) -> tuple[float, str]:
        """What y is divided by, and the unit of what comes of it."""
        if self.unit != "bytes":
            return 1.0, self.unit
        most = max((y for _, y in self._finite), default=0.0)
        return next(((size, name) for size, name in _SIZES if most >= size), _SIZES[-1])

    @property
    def _unit_shown(self) -> str:
        return self._scale[1]

    def _svg(self) -> Element:
        divisor, _ = self._scale
        # Gaps have their place, too, so that charts of one run have one scale.
        xs, ys = [x for line in self.lines for x, _ in line.points], [y / divisor for _, y in self._finite]
        x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, X_TICKS)
        y_axis = _Axis(0.0 if self.from_zero else min(ys), max(ys) * HEADROOM, HEIGHT - BOTTOM, TOP, Y_TICKS)
        parts = [*_grid(x_axis, y_axis, self.x_label), *(_mark(mark, x_axis) for mark in self.marks)]
        for line in self.lines:
            scaled = [(x, y / divisor) for x, y in line.points]
            parts += [_polyline(line, run, x_axis, y_axis) for run in _runs(scaled)]
        return element(
            "svg", element("title", self.title), *parts, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img",
            aria_label=self.title,
        )  # fmt: skip

    def _legend(self) -> list[Element]:
        if len(self.lines) < 2:
            return []
        return [
            element(
                "ul",
                *(
                    element("li", _swatch(line.color, is_dashed=line.is_dashed), " ", line.label)
                    for line in self.lines
                ),
                class_="legend",
            )
        ]  # fmt: skip


_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class _Axis:
    """From values to places, with a range that ends at ticks."""

    def __init__(self, least: float, most: float, begin: float, end: float, ticks: int) -> None:
        if most <= least:  # a line that stays where it is
            least, most = (least - 0.5, most + 0.5) if least or most else (0.0, 1.0)
        step = tick_step(least, most, ticks)
        self.ticks = [step * number for number in range(math.ceil(least / step), math.floor(most / step) + 1)]
        self._least, self._most, self._begin, self._end = least, most, begin, end

    def place(self, value: float) -> float:
        share = (value - self._least) / (self._most - self._least)
        return self._begin + share * (self._end - self._begin)


def tick_step(least: float, most: float, ticks: int = Y_TICKS) -> float:
    """The step of 1, 2 or 5 times a power of ten that gives about so many ``ticks``, and never more."""
    rough = (most - least) / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str) -> Iterator[Element]:
    for value in y_axis.ticks:
        y = y_axis.place(value)
        yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        yield element("text", f"{value:,.6g}", x=LEFT - 8, y=y + FONT_PX / 3, class_="y tick")
    for value in x_axis.ticks:
        x = x_axis.place(value)
        yield element("line", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="grid")
        if x < WIDTH - RIGHT - 70:  # where the label of the axis is
            yield element("text", f"{value:,.6g}", x=x, y=HEIGHT - BOTTOM + 18, class_="x tick")
    yield element("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - BOTTOM + 18, class_="x label")


def _mark(mark: Mark, x_axis: _Axis) -> Element:
    x = x_axis.place(mark.x)
    line = element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, stroke=mark.color, class_="mark")
    return element("g", element("title", mark.text), line)


def _polyline(line: Line, points: Sequence[Point], x_axis: _Axis, y_axis: _Axis) -> Element:
    places = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in thinned(points))
    dashes: dict[str, str | float] = {"stroke_dasharray": "5 3"} if line.is_dashed else {}
    return element("polyline", element("title", line.label), points=places, stroke=line.color, class_="line", **dashes)


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Points in a row without a gap."""
    run: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points, with every peak: of each bucket the least and the greatest, in their order."""
    if len(points) <= most:
        return list(points)
    buckets = most // 2
    kept: list[Point] = []
    for number in range(buckets):
        bucket = points[number * len(points) // buckets : (number + 1) * len(points) // buckets]
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _swatch(color: str, *, is_dashed: bool = False) -> Element:
    return element("span", style=f"border-top: 3px {'dashed' if is_dashed else 'solid'} {color}", class_="swatch")
