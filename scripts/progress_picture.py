"""Picture of a failure-free run and a killed run over wall time, with the parts of the recovery and the loss.

Run ``python scripts/progress_picture.py runs/demo/failure_free runs/demo/killed`` after ``make demo``. The picture
states that the results of both runs are equal. The script therefore ends with exit code 2 if the runs differ, or if the
killed run does not have exactly one recovery.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from moevement_cli.recovery_chart import COLORS
from moevement_core.errors import RunRecordError
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from scripts.diagrams import INK, ROOT, STYLE, WIDTH, in_the_ink_of_the_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTPUT = ROOT / "docs" / "progress.svg"
FAILURE_FREE, KILLED = "#8c8c8c", "#0072b2"


def progress(run: RunRecord) -> tuple[list[float], list[int]]:
    """Return times in seconds since training began, and the newest committed iteration at each time."""
    lines, began = run.metrics(), _began(run)
    return [0.0, *(line["time"] - began for line in lines)], [0, *(line["iteration"] for line in lines)]


def picture(failure_free: RunRecord, killed: RunRecord) -> str:
    """Return the picture as the text of an SVG file.

    Raises:
        RunRecordError: the runs differ, or the killed run does not have exactly one recovery.
    """
    verdict = compare(failure_free, killed)
    if not verdict.equal:
        raise RunRecordError(f"{killed.folder}: run differs from {failure_free.folder} ({verdict.first_difference})")
    failures = [event for event in killed.events() if event["event"] == "failure"]
    if len(failures) != 1:
        raise RunRecordError(f"{killed.folder}: the run has {len(failures)} recoveries; give a run with exactly one")
    with matplotlib.rc_context(STYLE):
        file = io.StringIO()
        _figure(failure_free, killed, failures[0]).savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return in_the_ink_of_the_page(file.getvalue())


def _began(run: RunRecord) -> float:
    first = run.metrics()[0]
    return float(first["time"] - first["iteration_s"])


def _figure(failure_free: RunRecord, killed: RunRecord, failure: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 6.0), layout="constrained")
    above, parts, below = figure.subplots(3, 1, height_ratios=(3.2, 1.9, 1.5))
    _draw_progress(above, failure_free, killed, failure)
    _draw_parts(parts, failure["parts"])
    iterations = [line["iteration"] for line in killed.metrics()]
    below.plot(iterations, [line["loss"] for line in killed.metrics()], color=KILLED)
    below.set(xlabel="iteration", ylabel="loss")
    below.set_title("loss of both runs: equal, bit for bit", loc="left", size=12, color=INK)
    for axes in (above, below):
        _ink(axes)
    return figure


def _draw_progress(axes: Axes, failure_free: RunRecord, killed: RunRecord, failure: dict[str, Any]) -> None:
    seconds, iterations = progress(failure_free)
    axes.plot(seconds, iterations, color=FAILURE_FREE, drawstyle="steps-post", label="failure-free")
    seconds, iterations = progress(killed)
    axes.plot(seconds, iterations, color=KILLED, drawstyle="steps-post", label="one rank killed")
    at = failure["failed_at"] - _began(killed)
    reached = max(iteration for second, iteration in zip(seconds, iterations, strict=True) if second <= at)
    axes.plot([at], [reached], marker="X", color="#d55e00", markersize=10, linestyle="none")
    axes.annotate(
        f"killed; trains again {failure['resumed_at'] - failure['failed_at']:.1f} s later", (at, reached), color=INK,
        xytext=(at + 0.03 * seconds[-1], reached - 0.12 * iterations[-1]), va="top",
    )  # fmt: skip
    axes.set(xlabel="seconds of training", ylabel="iteration", xlim=(0, None), ylim=(0, None))
    axes.legend(loc="upper left", frameon=False, labelcolor=INK)


def _draw_parts(axes: Axes, parts: dict[str, float]) -> None:
    """Draw the recovery as one bar, with the seconds of each part below the bar."""
    start, total = 0.0, sum(parts.values())
    for place, (part, seconds) in enumerate(parts.items()):
        axes.barh(0.0, seconds, left=start, height=0.8, color=COLORS[part])
        start += seconds
        x, y = (place % 2) * total / 2, -1.2 - 1.0 * (place // 2)
        axes.barh(y, 0.02 * total, left=x, height=0.5, color=COLORS[part])
        axes.text(x + 0.03 * total, y, f"{part} {seconds:.2f} s", va="center", color=INK)
    axes.set(xlim=(0, total), ylim=(-3.7, 0.5))
    axes.set_title("the recovery, part by part", loc="left", size=12, color=INK)
    axes.set_axis_off()


def _ink(axes: Axes) -> None:
    axes.tick_params(colors=INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(INK)


def main(words: Sequence[str] | None = None) -> None:
    """Draw the picture, and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("failure_free", metavar="FAILURE_FREE", type=Path, help="run directory without a failure")
    parser.add_argument("killed", metavar="KILLED", type=Path, help="run directory with one recovery")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=OUTPUT, help="SVG file to write (default: %(default)s)"
    )
    arguments = parser.parse_args(words)
    try:
        drawn = picture(RunRecord(arguments.failure_free), RunRecord(arguments.killed))
    except RunRecordError as error:
        parser.exit(2, f"progress_picture: {error}\n")
    arguments.output.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
