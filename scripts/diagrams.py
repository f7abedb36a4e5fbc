"""Writes docs/diagrams/*.svg: the parts of a job, a window's slots, and where a recovery's seconds go.

``python scripts/diagrams.py``. What a slot holds is asked of the schedule that a job has, and the seconds are those of
benchmarks/kills.md, so neither can be drawn otherwise than it is; a test compares the files.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np

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

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and compared
    "svg.hashsalt": "moevement",  # names inside the file do not change from one drawing to the next
    "font.family": "sans-serif",
    "font.size": 10,
}
FULL, COMPUTE, PALE, INK = "#3f51b5", "#b9c2ea", "#f4f5fb", "#222222"
PHASES = ("detect", "abort", "regroup", "set up and fetch", "enter the loop", "restore")
COLOURS = ("#8d6e63", "#e57373", "#ffb74d", "#64b5f6", "#90a4ae", "#3f51b5")


def architecture() -> Figure:
    """Processes of a job on two nodes, and the rooms of the code within a rank."""
    figure, axes = _canvas(9.6, 5.2)
    _box(axes, 0.2, 4.3, 9.2, 0.7, "moevement launch, or moevement coordinate under Slurm", "holds the store "
         "that ranks meet in; gives out ranks; decides by leases who lives", FULL, "white")  # fmt: skip
    for x, name, ranks in ((0.2, "node 0", ("rank 0", "rank 1")), (4.0, "node 1", ("rank 2", "rank 3"))):
        _box(axes, x, 0.2, 3.6, 3.7, "", "", PALE)
        axes.text(x + 0.1, 3.65, name, weight="bold")
        _box(axes, x + 0.2, 2.85, 3.2, 0.6, "supervisor", "starts, watches, renews leases", COMPUTE)
        for place, rank in enumerate(ranks):
            _box(axes, x + 0.2 + 1.65 * place, 0.4, 1.55, 2.2, rank, "", "white")
            for height, text in (
                (1.75, "Megatron's\ntrainer"),
                (1.15, "megatron/\nmoevement"),
                (0.5, "moevement_core"),
            ):
                axes.text(x + 0.97 + 1.65 * place, height, text, ha="center", va="bottom", size=8)
    _box(axes, 7.8, 0.2, 1.6, 3.7, "", "", PALE)
    axes.text(7.9, 3.65, "spare", weight="bold")
    axes.text(8.6, 2.2, "imports done,\nflags parsed;\nwaits in no\nprocess group", ha="center", va="center", size=8)
    for x in (2.0, 5.8, 8.6):
        _arrow(axes, (x, 4.3), (x, 3.95))
    _arrow(axes, (3.45, 0.95), (4.25, 0.95), both=True)
    axes.text(3.85, 0.05, "snapshots to peers on other nodes, over connections of their own", ha="center", size=8)
    return figure


def window() -> Figure:
    """What each snapshot of two aligned windows holds, from the schedule itself."""
    schedule = _example_schedule()
    snapshots = schedule.start + np.arange(2 * schedule.size)
    figure, axes = _canvas(9.6, 3.6)
    axes.set(xlim=(-2.4, len(snapshots) + 0.1), ylim=(-1.7, len(schedule.table) + 0.7))
    for column, iteration in enumerate(snapshots):
        contents = schedule.contents(int(iteration))
        for row, place in enumerate(schedule.order):
            saved = Saved(int(contents[place]))
            colour, text, ink = _HELD[saved]
            _box(axes, column, len(schedule.table) - 1 - row, 0.94, 0.9, "", "", colour)
            axes.text(
                column + 0.47, len(schedule.table) - 0.55 - row, text, ha="center", va="center", size=8, color=ink
            )
        axes.text(column + 0.47, len(schedule.table) + 0.15, f"SS{iteration}", ha="center", weight="bold")
    for row, place in enumerate(schedule.order):
        axes.text(-0.15, len(schedule.table) - 0.55 - row, schedule.table.names[place], ha="right", va="center", size=9)
    for first in (0, schedule.size):
        axes.plot((first + 0.05, first + schedule.size - 0.1), (-0.35, -0.35), color=INK, lw=1)
        axes.text(first + schedule.size / 2, -0.5, f"one window, W = {schedule.size}", ha="center", va="top", size=9)
    axes.text(
        -2.3, -1.5, "the least popular expert is first in the order; after a window's last snapshot everything is "
        "there in full", size=8,
    )  # fmt: skip
    return figure


_HELD = {
    Saved.FULL: (FULL, "full state", "white"),
    Saved.COMPUTE: (COMPUTE, "compute weights", INK),
    Saved.NOTHING: ("white", "", INK),
}


def recovery() -> Figure:
    """Where the seconds of a recovery go, for each way, as benchmarks/kills.md has them."""
    rows = _seconds_of_phases()
    figure, axes = _canvas(9.6, 2.6)
    longest = max(seconds["total"] for seconds in rows.values())
    axes.set(xlim=(-0.16 * longest, 1.1 * longest), ylim=(-1.35, len(rows)))
    for row, (way, seconds) in enumerate(reversed(rows.items())):
        axes.text(-0.02 * longest, row + 0.4, way, ha="right", va="center", weight="bold")
        start = 0.0
        for phase, colour in zip(PHASES, COLOURS, strict=True):
            axes.barh(row + 0.4, seconds[phase], left=start, height=0.6, color=colour)
            start += seconds[phase]
        axes.text(start + 0.01 * longest, row + 0.4, f"{seconds['total']:.2f} s", va="center")
    for place, (phase, colour) in enumerate(zip(PHASES, COLOURS, strict=True)):
        x = -0.14 * longest + (place % 6) * 0.205 * longest
        axes.barh(-0.4, 0.02 * longest, left=x, height=0.3, color=colour)
        axes.text(x + 0.03 * longest, -0.4, phase, va="center", size=9)
    axes.text(
        -0.14 * longest,
        -1.1,
        "medians of each phase and of the total, 10 kills each, four ranks on two cores: benchmarks/kills.md",
        size=8,
    )
    return figure


DIAGRAMS = {"architecture": architecture, "window": window, "recovery": recovery}


def svg(name: str) -> str:
    """One diagram as a file has it; the same whenever it is drawn."""
    with matplotlib.rc_context(STYLE):
        figure = DIAGRAMS[name]()
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _example_schedule() -> SparseSchedule:
    """Six experts of one layer, two to a slot, the least popular first."""
    state = StateBytes(compute=2, master=4, optimizer=8)
    table = OperatorTable([Operator(expert_name(0, expert), OperatorKind.EXPERT, state) for expert in range(6)])
    order = np.array([3, 0, 5, 1, 4, 2])
    return SparseSchedule(table, order, impose_window(table, order, 3, WindowKind.ALIGNED), start=1)


def _seconds_of_phases() -> dict[str, dict[str, float]]:
    """The rows of benchmarks/kills.md that have all phases."""
    table = [line for line in KILLS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    found = {}
    for cells in rows:
        row = dict(zip(names, cells, strict=True))
        if all(row[phase] for phase in PHASES):
            found[row["way"]] = {name: float(row[name]) for name in (*PHASES, "total")}
    return found


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, colour: str, ink: str = INK
) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour, edgecolor="#9fa8da"
        )
    )
    middle = x + width / 2
    if title:
        axes.text(middle, y + height - 0.08, title, ha="center", va="top", weight="bold", color=ink)
    if text:
        axes.text(middle, y + 0.08, text, ha="center", va="bottom", size=8, color=ink)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], *, both: bool = False) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "<->" if both else "->", "color": INK})


def main() -> None:
    """Draw all of them."""
    OUTPUT.mkdir(exist_ok=True)
    for name in DIAGRAMS:
        (OUTPUT / f"{name}.svg").write_text(svg(name), encoding="utf-8")


if __name__ == "__main__":
    main()
