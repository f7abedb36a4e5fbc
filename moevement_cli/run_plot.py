"""Plot of ``moevement report --plot``: loss and overhead over iterations, and progress over wall time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from moevement_cli.colors import RUN_COLORS, RUN_DASHES
from moevement_cli.plotting import figure
from moevement_cli.run_facts import Point, RunFacts, headline
from moevement_cli.saving_costs import view
from moevement_core.overhead.estimate import CONFIDENCE

MOST_LABELED = 4
"""Maximum number of recoveries, over all runs, at which marks have labels. With more recoveries no mark has a label."""


def draw(runs: Sequence[RunFacts], path: Path) -> None:
    """Draw ``runs`` to a file, with a mark at each recovery.

    The figure has a panel for the overhead of saving if a run measured that overhead.

    Raises:
        ConfigError: the figure cannot be drawn or written.
    """
    has_costs = any(run.saving_costs.newest is not None for run in runs)
    with figure(path, 3 if has_costs else 2, (15.5 if has_costs else 11, 4.2)) as axes:
        loss, progress = axes[:2]
        for run, look in _looks(runs):
            _line(loss, [(x, y) for x, y in run.series("loss") if math.isfinite(y)], look)
            _line(progress, run.progress(), look)
            _mark(
                run, look["color"], loss, progress, is_labeled=sum(len(run.recoveries) for run in runs) <= MOST_LABELED
            )
        loss.set(xlabel="iteration", ylabel="training loss")
        progress.set(xlabel="seconds since the first iteration began", ylabel="committed iterations")
        if has_costs:
            _draw_costs(runs, axes[2])
            axes[2].set_xlim(loss.get_xlim())
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend()
        origin = dict(runs[0].origin())
        about = "; ".join(f"{name}: {origin[name]}" for name in ("model", "ranks") if name in origin)
        loss.figure.suptitle(f"{headline(runs)}\n{about}" if about else headline(runs), fontsize=11)


def _looks(runs: Sequence[RunFacts]) -> Iterator[tuple[RunFacts, dict[str, Any]]]:
    """Yield each run with the color, dashes and label of its lines."""
    for run, color, dashes in zip(runs, cycle(RUN_COLORS), cycle(RUN_DASHES), strict=False):
        lengths = [float(length) / 2 for length in dashes.split()]  # in line widths
        yield run, {"color": color, "linestyle": (0, lengths) if lengths else "-", "linewidth": 1.8, "label": run.name}


def _line(axis: Any, points: Sequence[Point], look: dict[str, Any]) -> None:
    axis.plot([x for x, _ in points], [y for _, y in points], **look)


def _draw_costs(runs: Sequence[RunFacts], axis: Any) -> None:
    """Draw the overhead of saving, with its confidence interval as a band."""
    for run, look in _looks(runs):
        _line(axis, run.saving_costs.points(), look)
        intervals = zip(*run.saving_costs.intervals(), strict=True)
        axis.fill_between(*intervals, color=look["color"], alpha=0.15, linewidth=0)
    low, high = view([run.saving_costs for run in runs])
    margin = 0.05 * ((high - low) or 1.0)
    axis.set(xlabel="iteration", ylabel=f"saving costs, % of training ({CONFIDENCE:.0%} interval)")
    axis.set_ylim(low - margin, high + margin)
    axis.axhline(0.0, color="black", linewidth=0.8)


def _mark(run: RunFacts, color: str, loss: Any, progress: Any, *, is_labeled: bool) -> None:
    """Mark the recoveries of a run: as lines at iterations in ``loss``, and as spans of time in ``progress``."""
    for recovery in run.recoveries:
        at = run.iteration_at(recovery) + 0.5
        end = run.elapsed_s(recovery["resumed_at"])
        loss.axvline(at, color=color, linestyle=":", linewidth=1.2)
        progress.axvspan(end - recovery["total_s"], end, color=color, alpha=0.15, linewidth=0)
        if is_labeled:
            words = f" {failure_text(recovery)}"
            loss.annotate(words, (at, 0.97), xycoords=("data", "axes fraction"), va="top", fontsize=9, color=color)
            progress.annotate(
                f" {recovery['total_s']:.1f} s",
                (end, 0.03),
                xycoords=("data", "axes fraction"),
                fontsize=9,
                color=color,
            )


def failure_text(recovery: dict[str, Any]) -> str:
    """Return a few words that name the failure, such as ``rank 2 killed``, without pids and reasons."""
    failures = [*recovery.get("earlier", ()), *recovery["failures"]]
    if not failures:
        return "all ranks restarted"
    what = failures[0].split(" (")[0] + (" killed" if " was killed " in failures[0] else " failed")
    return what if len(failures) == 1 else f"{what} and {len(failures) - 1} more"
