"""Generator of docs/diagrams/*.svg: the parts of a job, the slots of a window, and the seconds of a recovery.

Run the script with ``python scripts/diagrams.py``. It computes the slots with the schedule code that jobs use, and
reads the seconds from benchmarks/kills.md. A test compares the SVG files with new drawings.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np

from moevement_cli.recovery_chart import COLORS
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.schedule import Saved
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.strategies.sparse import SparseSchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "diagrams"
KILLS = ROOT / "benchmarks" / "kills.md"

PHASES = ("detect", "abort", "regroup", "set up and fetch", "enter the loop", "restore")

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: readers can search and compare it, and a screen reader can read it
    "svg.hashsalt": "moevement",  # identifiers in the file are the same each time it is drawn
    "font.family": "sans-serif",
    "font.size": 12,  # 16 px at full width, which is legible on a phone
}
INK = "#123456"
"""Placeholder for the color of text, which is dark on a light page and light on a dark one."""
DARK, FULL, COMPUTE = "#111111", "#3f51b5", "#b9c2ea"
WIDTH = 6.4
"""Width of a figure in inches, equal to the width of a column of text."""


def architecture() -> Figure:
    """Draw the processes of a job on two nodes and a spare node, and the paths of snapshots."""
    figure, axes = _canvas(WIDTH, 4.6)
    _box(
        axes,
        x=0.1,
        y=3.75,
        width=6.2,
        height=0.75,
        title="launcher, or coordinator under Slurm",
        text="gives out ranks; decides who lives",
        colour=FULL,
    )
    for place, (name, members) in enumerate(
        (("node 0", ("rank 0", "rank 1")), ("node 1", ("rank 2", "rank 3")), ("spare node", ("spare", "spare")))
    ):
        x = 0.1 + 2.1 * place
        _box(axes, x, y=0.55, width=2.0, height=2.8, title="", text="", colour=None)
        axes.text(x + 1.0, 3.1, name, weight="bold", ha="center", va="center", color=INK)
        _box(axes, x=x + 0.1, y=2.4, width=1.8, height=0.5, title="supervisor", text="", colour=COMPUTE)
        for row, member in enumerate(members):
            _box(axes, x=x + 0.1, y=1.5 - 0.8 * row, width=1.8, height=0.7, title="", text=member, colour=None)
        _arrow(axes, (x + 1.0, 3.72), (x + 1.0, 3.38))
    for y in (1.85, 1.05):
        _arrow(axes, (1.85, y), (2.45, y), both=True)
    axes.text(2.15, 0.25, "snapshots, each way", ha="center", va="center", color=INK)
    axes.text(5.3, 0.25, "waits for a rank", ha="center", va="center", color=INK)
    return figure


def window() -> Figure:
    """Draw the contents of each snapshot of two aligned windows, computed by the schedule."""
    schedule = _example_schedule()
    snapshots = schedule.start + np.arange(2 * schedule.size)
    figure, axes = _canvas(WIDTH, 3.9)
    rows = len(schedule.table)
    axes.set(xlim=(-1.45, len(snapshots) + 0.05), ylim=(-1.0, rows + 0.75))
    for column, iteration in enumerate(snapshots):
        contents = schedule.contents_of_slot(schedule.slot(int(iteration)))
        assert contents is not None, "the schedule of the diagram captures a snapshot in every iteration"
        for row, place in enumerate(schedule.order):
            colour, text = _HELD[Saved(int(contents[place]))]
            _box(axes, x=column, y=rows - 1 - row, width=0.94, height=0.9, title="", text=text, colour=colour)
        axes.text(column + 0.47, rows + 0.15, f"SS{iteration}", ha="center", weight="bold", color=INK)
    for row, place in enumerate(schedule.order):
        name = f"expert {place}"
        axes.text(-0.1, rows - 0.55 - row, name, ha="right", va="center", color=INK)
    for first in (0, schedule.size):
        axes.plot((first + 0.05, first + schedule.size - 0.1), (-0.2, -0.2), color=INK, lw=1)
        text = f"a window, W = {schedule.size}"
        axes.text(first + schedule.size / 2, -0.35, text, ha="center", va="top", color=INK)
    return figure


_HELD = {Saved.FULL: (FULL, "all"), Saved.COMPUTE: (COMPUTE, "weights"), Saved.NOTHING: (None, "")}
"""Color and word for the part of an operator that a snapshot holds."""


def recovery() -> Figure:
    """Draw the seconds of each part of a recovery, with a row for each kind of recovery in benchmarks/kills.md."""
    rows = _seconds_of_phases()
    figure, axes = _canvas(WIDTH, 2.7)
    longest = max(seconds["total"] for seconds in rows.values())
    axes.set(xlim=(-0.14 * longest, 1.16 * longest), ylim=(-2.3, len(rows)))
    for row, (way, seconds) in enumerate(reversed(rows.items())):
        axes.text(-0.02 * longest, row + 0.4, way, ha="right", va="center", weight="bold", color=INK)
        start = 0.0
        for phase, colour in COLOURS.items():
            axes.barh(row + 0.4, seconds[phase], left=start, height=0.6, color=colour)
            start += seconds[phase]
        axes.text(start + 0.01 * longest, row + 0.4, f"{seconds['total']:.2f} s", va="center", color=INK)
    for place, (phase, colour) in enumerate(COLOURS.items()):
        x, y = (0.44 * (place % 3) - 0.12) * longest, -0.6 - 0.7 * (place // 3)
        axes.barh(y, 0.03 * longest, left=x, height=0.35, color=colour)
        axes.text(x + 0.045 * longest, y, _WORDS.get(phase, phase), va="center", color=INK)
    axes.text(0.5 * longest, -2.1, "medians of 10 kills, four ranks on two cores", ha="center", color=INK)
    return figure


COLOURS = {phase: COLORS.get(phase, COLORS["replay"]) for phase in PHASES}
"""Colors of phases, the same as in reports and ``moevement top``."""
_WORDS = {"restore": "replay or redo"}


DIAGRAMS = {"architecture": architecture, "window": window, "recovery": recovery}


def svg(name: str) -> str:
    """Return one diagram as the text of an SVG file. The text is the same in every run."""
    with matplotlib.rc_context(STYLE):
        figure = DIAGRAMS[name]()
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return in_the_ink_of_the_page(file.getvalue())


def in_the_ink_of_the_page(drawn: str) -> str:
    """Return matplotlib's SVG without background, in a text color that follows the reader's light or dark theme."""
    text = "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"
    return text.replace(INK, "currentColor").replace("</metadata>", f"</metadata>\n{_INKS}", 1)


_INKS = "<style>svg { color: #1f2328 } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }</style>"


def _example_schedule() -> SparseSchedule:
    """Return a schedule of six experts of one layer, two per slot, the least popular first."""
    state = StateBytes(compute=2, master=4, optimizer=8)
    table = OperatorTable([Operator(expert_name(0, expert), OperatorKind.EXPERT, state) for expert in range(6)])
    order = np.array([3, 0, 5, 1, 4, 2])
    return SparseSchedule(table, order, impose_window(table, order, 3, WindowKind.ALIGNED), start=1)


def _seconds_of_phases() -> dict[str, dict[str, float]]:
    """Return the seconds of each phase, for every row of benchmarks/kills.md that has all phases."""
    table = [line for line in KILLS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    seconds = {}
    for cells in rows:
        row = dict(zip(names, cells, strict=True))
        if all(row[phase] for phase in PHASES):
            seconds[row["way"]] = {name: float(row[name]) for name in (*PHASES, "total")}
    return seconds


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, colour: str | None
) -> None:
    """Draw a box with a bold title, a text, or both. A box without a color has only an outline."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour or "none", edgecolor="#7986cb")
    )
    ink = {FULL: "white", COMPUTE: DARK, None: INK}[colour]
    middle, apart = x + width / 2, 0.25 * height if title and text else 0.0
    for words, place, weight in ((title, apart, "bold"), (text, -apart, "normal")):
        if words:
            axes.text(middle, y + height / 2 + place, words, ha="center", va="center", weight=weight, color=ink)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], *, both: bool = False) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "<->" if both else "->", "color": INK})


def main() -> None:
    """Draw all diagrams, and write their files."""
    OUTPUT.mkdir(exist_ok=True)
    for name in DIAGRAMS:
        (OUTPUT / f"{name}.svg").write_text(svg(name), encoding="utf-8")


if __name__ == "__main__":
    main()
