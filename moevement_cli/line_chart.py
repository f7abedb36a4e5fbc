"""SVG line charts over iterations or time, each with a table of its numbers for readers who cannot see the drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moevement_cli.elements import Element, element, table

WIDTH, HEIGHT = 520.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 22.0, 46.0
"""Margins around the plotting area, in pixels."""
MOST_POINTS = 1200
"""Maximum number of points drawn per line. :func:`thinned` reduces longer lines."""
MOST_ROWS = 25
X_TICKS, Y_TICKS = 7, 5
"""Approximate number of ticks per axis."""
HEADROOM = 1.04
FONT_PX = 12.0
CONSTANT = 1e-3
"""Largest spread of a line that counts as constant. The spread is (largest - least value) / greatest magnitude."""
LETTER_PX = 6.5
"""Approximate width of a letter, in pixels."""

Point = tuple[float, float]
Interval = tuple[float, float, float]
"""Tuple of x, the least y and the greatest y."""


@dataclass(frozen=True)
class Curve:
    """Curve of a chart, with its label and look."""

    label: str
    color: str
    points: Sequence[Point]
    """Points in the order of x. A y that is not finite is a gap."""
    dashes: str = ""
    """SVG dash pattern: lengths of dashes and gaps. An empty string draws a solid line."""
    band: Sequence[Interval] = ()
    """Intervals around the line, in the order of x. An interval with an end that is not finite is a gap."""

    @property
    def finite(self) -> list[Point]:
        """Points whose x and y are both finite."""
        return [point for point in self.points if math.isfinite(point[0]) and math.isfinite(point[1])]


@dataclass(frozen=True)
class ChartMark:
    """Event at ``x``, or span from ``x`` to ``until``."""

    x: float
    color: str
    text: str
    """Tooltip shown when the pointer is over the mark."""
    label: str = ""
    """Text printed above the mark. An empty string prints nothing."""
    until: float | None = None
    """End of the span. None draws the mark as a vertical line."""


@dataclass(frozen=True)
class Chart:
    """Chart with a title, lines, and marks that span its full height."""

    title: str
    lines: Sequence[Curve]
    marks: Sequence[ChartMark] = ()
    unit: str = ""
    """Unit of y, printed after the title. ``bytes`` shows numbers in kB, MB, GB or TB."""
    from_zero: bool = True
    x_label: str = "iteration"
    note: str = ""
    """Sentence below the chart."""
    steady: float = CONSTANT
    """Largest spread of a line's values at which the line counts as flat, as a share of the greatest magnitude."""
    view: tuple[float, float] | None = None
    """Range of y that is drawn. Values outside the range are drawn at its edge. None draws all values."""

    def draw(self) -> Element:
        """Return a figure with its caption, legend and table of numbers."""
        caption = element("figcaption", self.title + (f", {self._unit_shown}" if self._unit_shown else ""))
        if not self.has_values:
            return element("figure", caption, element("p", "nothing was recorded", class_="none"), class_="chart")
        note = [element("p", self.note, class_="soft")] if self.note else []
        return element("figure", caption, self._svg(), *self._legend(), *note, self._numbers(), class_="chart")

    @property
    def has_values(self) -> bool:
        """True if at least one line has a finite point."""
        return any(line.finite for line in self.lines)

    @property
    def is_constant(self) -> bool:
        """True if every line is flat within :attr:`steady`, so that one number per line can replace the chart."""
        return self.has_values and all(_spread(line.finite) <= self.steady for line in self.lines)

    def values(self) -> list[tuple[str, str]]:
        """Return the label and the value of each line, as text. Call it only for a constant chart."""
        divisor, unit = self._scale
        return [
            (
                line.label,
                ("" if _spread(line.finite) <= CONSTANT else "at most ")
                + f"{max(y for _, y in line.finite) / divisor:,.4g} {unit}".strip(),
            )
            for line in self.lines
            if line.finite
        ]

    @property
    def _scale(self) -> tuple[float, str]:
        """Divisor of y values, and the unit of the quotients."""
        if self.unit != "bytes":
            return 1.0, self.unit
        most = max((y for line in self.lines for _, y in line.finite), default=0.0)
        return next(((size, name) for size, name in _SIZES if most >= size), _SIZES[-1])

    @property
    def _unit_shown(self) -> str:
        return self._scale[1]

    def _svg(self) -> Element:
        divisor, _ = self._scale
        # The range of x includes gaps, so that all charts of one run have the same x axis.
        xs = [x for line in self.lines for x, _ in line.points if math.isfinite(x)]
        ys = [y / divisor for y in self.view or [y for line in self.lines for _, y in line.finite]]
        x_axis = _Axis(least=min(xs), most=max(xs), begin=LEFT, end=WIDTH - RIGHT, ticks=X_TICKS)
        ys += [0.0] if self.from_zero else []
        y_axis = _Axis(least=min(ys), most=max(ys) * HEADROOM, begin=HEIGHT - BOTTOM, end=TOP, ticks=Y_TICKS)
        parts = [*_grid(x_axis, y_axis, self.x_label), *_marks(self.marks, x_axis)]
        for line in self.lines:
            scaled_band = [(x, low / divisor, high / divisor) for x, low, high in line.band]
            parts += [_band(line, run, x_axis, y_axis) for run in _runs(scaled_band)]
        for line in self.lines:
            scaled = [(x, y / divisor) for x, y in line.points]
            parts += [_polyline(line, run, x_axis, y_axis) for run in _runs(scaled)]
        return element(
            "svg", element("title", self.title), *parts, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img",
            aria_label=f"{self.title}: {self._summary()}",
        )  # fmt: skip

    def _summary(self) -> str:
        """Return a sentence for screen readers: first and last value of each line, and the text of each mark."""
        divisor, unit = self._scale
        spoken = []
        for line in self.lines:
            if values := [y / divisor for _, y in line.finite]:
                spoken.append(f"{line.label} from {values[0]:.4g} to {values[-1]:.4g} {unit}".strip())
        return "; ".join([*spoken, *(mark.text for mark in self.marks)])

    def _numbers(self) -> Element:
        """Return a table with at most :data:`MOST_ROWS` rows. The page shows it collapsed until a user opens it."""
        divisor, unit = self._scale
        xs = sorted({x for line in self.lines for x, _ in line.finite})
        shown = xs if len(xs) <= MOST_ROWS else [xs[k * (len(xs) - 1) // (MOST_ROWS - 1)] for k in range(MOST_ROWS)]
        by_x = [_texts(line, divisor) for line in self.lines]
        rows = [[f"{x:,.6g}", *(texts.get(x, "\N{EN DASH}") for texts in by_x)] for x in shown]
        head = [self.x_label, *(f"{line.label}{f', {unit}' if unit else ''}" for line in self.lines)]
        return element("details", element("summary", "Numbers"), table(head, rows), class_="numbers")

    def _legend(self) -> list[Element]:
        if len(self.lines) < 2:
            return []
        return [
            element(
                "ul",
                *(
                    element("li", _swatch(line.color, line.dashes), " ", line.label)
                    for line in self.lines
                ),
                class_="legend",
            )
        ]  # fmt: skip


def _texts(line: Curve, divisor: float) -> dict[float, str]:
    """Return the text of each value of a line by x. The text includes the interval around the value."""
    texts = {x: f"{y / divisor:,.4g}" for x, y in line.finite}
    for x, low, high in line.band:
        if x in texts and math.isfinite(low) and math.isfinite(high):
            texts[x] += f" ({low / divisor:,.4g} to {high / divisor:,.4g})"
    return texts


_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def _spread(points: Sequence[Point]) -> float:
    """Return the difference of the greatest and the least value, as a share of the greatest magnitude."""
    values = [y for _, y in points] or [0.0]
    return (max(values) - min(values)) / (max(map(abs, values)) or 1.0)


class _Axis:
    """Mapping from the values of an axis to SVG coordinates, and the ticks of the axis."""

    def __init__(self, least: float, most: float, begin: float, end: float, ticks: int) -> None:
        if most <= least:  # all values are equal
            least, most = (least - 0.5, most + 0.5) if least or most else (0.0, 1.0)
        step = tick_step(least, most, ticks)
        self.ticks = [step * number for number in range(math.ceil(least / step), math.floor(most / step) + 1)]
        self._least, self._most, self._begin, self._end = least, most, begin, end

    def place(self, value: float) -> float:
        share = (value - self._least) / (self._most - self._least)
        return self._begin + min(max(share, 0.0), 1.0) * (self._end - self._begin)


def tick_step(least: float, most: float, ticks: int = Y_TICKS) -> float:
    """Return the smallest step that divides the range into at most ``ticks`` parts.

    A step is 1, 2 or 5 times a power of ten.
    """
    rough = (most - least) / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str) -> Iterator[Element]:
    bottom = HEIGHT - BOTTOM
    for value in y_axis.ticks:
        y = y_axis.place(value)
        yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        yield element("text", f"{value:,.6g}", x=LEFT - 8, y=y + FONT_PX / 3, class_="y tick")
    for value in x_axis.ticks:
        x, text = x_axis.place(value), f"{value:,.6g}"
        yield element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="grid")
        half = LETTER_PX * len(text) / 2
        yield element("text", text, x=min(x, WIDTH - half - 1), y=bottom + 18, class_="x tick")
    yield element("text", x_label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="x label")


def _marks(marks: Sequence[ChartMark], x_axis: _Axis) -> Iterator[Element]:
    """Yield lines and spans. A label is left out where it would overlap the label before it."""
    free_from = LEFT
    for mark in sorted(marks, key=lambda mark: mark.x):
        yield _mark(mark, x_axis)
        width = LETTER_PX * len(mark.label)
        x = min(x_axis.place(mark.x), WIDTH - RIGHT - width)
        if mark.label and x >= free_from:  # labels must not overlap
            yield element("text", mark.label, x=x, y=TOP - 6, class_="mark-label", fill=mark.color)
            free_from = x + width + LETTER_PX


def _mark(mark: ChartMark, x_axis: _Axis) -> Element:
    x, title = x_axis.place(mark.x), element("title", mark.text)
    if mark.until is None:
        line = element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, stroke=mark.color, class_="mark")
        return element("g", title, line)
    width = max(x_axis.place(mark.until) - x, 1.0)
    span = element("rect", x=x, y=TOP, width=width, height=HEIGHT - BOTTOM - TOP, fill=mark.color, class_="span")
    return element("g", title, span)


def _polyline(line: Curve, points: Sequence[Point], x_axis: _Axis, y_axis: _Axis) -> Element:
    places = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in thinned(points))
    dashes = _dashed(line.dashes)
    return element("polyline", element("title", line.label), points=places, stroke=line.color, class_="line", **dashes)


def _band(line: Curve, intervals: Sequence[Interval], x_axis: _Axis, y_axis: _Axis) -> Element:
    upper = thinned([(x, high) for x, _, high in intervals])
    lower = thinned([(x, low) for x, low, _ in intervals])
    places = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in [*upper, *reversed(lower)])
    return element(
        "polygon", element("title", f"{line.label}, interval"), points=places, fill=line.color, class_="band"
    )


def _dashed(dashes: str) -> dict[str, str | float]:
    return {"stroke_dasharray": dashes} if dashes else {}


def _runs[T: tuple[float, ...]](points: Sequence[T]) -> Iterator[list[T]]:
    """Yield the sequences of points or intervals between gaps."""
    run: list[T] = []
    for point in points:
        if all(map(math.isfinite, point)):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most ``most`` points.

    The function divides the points into buckets. It keeps the least and the greatest point of each bucket, in the order
    of x, so that every peak stays visible.
    """
    if len(points) <= most:
        return list(points)
    buckets = most // 2
    kept: list[Point] = []
    for number in range(buckets):
        bucket = points[number * len(points) // buckets : (number + 1) * len(points) // buckets]
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _swatch(color: str, dashes: str) -> Element:
    line = element("line", x1=0, x2=26, y1=3, y2=3, stroke=color, stroke_width=3, **_dashed(dashes))
    return element("svg", line, class_="swatch", viewBox="0 0 26 6", aria_hidden="true")
