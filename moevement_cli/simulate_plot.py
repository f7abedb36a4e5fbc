"""Figure of ``moevement simulate --plot``, with four panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moevement_cli.plotting import figure
from moevement_cli.simulate_tables import PARTS, jobs_in, name_of
from moevement_cli.units import span
from moevement_core.simulator.costs import GeminiCost
from moevement_core.simulator.experiment import Cell

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Colors of strategies in every panel. The colors suit readers with color vision deficiency (Okabe and Ito)."""
PART_COLOURS = ("#222222", "#555555", "#888888", "#AAAAAA", "#56B4E9", "#CC79A7", "#E69F00", "#D55E00")
MARKERS, LINES = "osD^v<>", ("-", "--", "-.", ":")
"""Markers and dash styles that keep overlapping lines visible."""
INTERVALS = 40
"""Number of points on each curve of panel 4, which shows ETTR over the interval between checkpoints."""


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw the four panels.

    Panel 1 shows ETTR over the failure rate. Panels 2 and 3 show lost time by part, and progress, at the highest
    failure rate. Panel 4 shows ETTR over the interval between checkpoints.
    """
    count = jobs_in(cells)
    lines: dict[str, list[Cell]] = {}
    for cell in cells:
        lines.setdefault(name_of(cell, count), []).append(cell)
    here = {name: min(own, key=lambda cell: cell.mtbf_s) for name, own in lines.items()}
    styles = {
        name: {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)],
               "marker": MARKERS[number % len(MARKERS)]}
        for number, name in enumerate(lines)
    }  # fmt: skip
    worst = min(cell.mtbf_s for cell in cells)
    with figure(path, 2, (12, 9), rows=2) as axes:
        _draw_ratios(lines, styles, axes[0])
        _draw_lost(here, axes[1])
        _draw_behind(here, styles, axes[2])
        _draw_intervals(cells, axes[3])
        jobs = ", ".join(dict.fromkeys(f"{cell.job} on {cell.ranks} ranks" for cell in cells))
        axes[0].figure.suptitle(f"{jobs}; panels 2 and 3: a failure every {span(worst)}")
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)


def _draw_ratios(lines: Mapping[str, Sequence[Cell]], styles: Mapping[str, Mapping[str, Any]], axis: Any) -> None:
    for name, own in lines.items():
        intervals = [cell.interval if len(cell.outcomes) > 1 else 0 for cell in own]
        axis.errorbar(
            [cell.mtbf_s for cell in own], [cell.ettr for cell in own], yerr=intervals, label=name, **styles[name]
        )
    rates = sorted({cell.mtbf_s for own in lines.values() for cell in own})
    axis.set(
        xscale="log", xlabel="mean time between failures", ylabel="effective training time ratio",
        title="1: ETTR, simulated (bars: 95%)",
    )  # fmt: skip
    axis.set_xticks(rates, [span(rate) for rate in rates])
    axis.minorticks_off()
    axis.legend(fontsize=8)


def _draw_lost(here: Mapping[str, Cell], axis: Any) -> None:
    left = dict.fromkeys(here, 0.0)
    for (part, (_, meaning)), colour in zip(PARTS.items(), PART_COLOURS, strict=True):
        shares = {name: 100 * cell.lost[part] for name, cell in here.items()}
        axis.barh(list(here), list(shares.values()), left=list(left.values()), label=meaning, color=colour)
        left = {name: before + shares[name] for name, before in left.items()}
    axis.set(xlabel="% of the time", title="2: parts of the lost time")
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)


def _draw_behind(here: Mapping[str, Cell], styles: Mapping[str, Mapping[str, Any]], axis: Any) -> None:
    """Draw how many minutes a training is behind a training without checkpoints and failures.

    Curves of the progress itself would lie too close together to tell them apart.
    """
    for name, cell in here.items():
        first = cell.outcomes[0]
        points = [(0.0, 0), *first.goodput]
        behind = [(at_s - count * first.iteration_s) / 60 for at_s, count in points]
        axis.plot([at_s / 3600 for at_s, _ in points], behind, label=name, **{**styles[name], "marker": ""})
    axis.set(
        xlabel="hours of training", ylabel="minutes behind a training without failures",
        title="3: time lost so far, first of the trainings",
    )  # fmt: skip
    axis.legend(fontsize=8)


def _draw_intervals(cells: Sequence[Cell], axis: Any) -> None:
    """Draw ETTR over the interval of dense checkpoints in peers' memory, for the first job.

    The ETTR comes from a formula (MoEvement, section 2.4), not from simulated failures.
    """
    costs = cells[0].strategy.costs
    best = {mtbf_s: GeminiCost(costs, mtbf_s).interval for mtbf_s in dict.fromkeys(cell.mtbf_s for cell in cells)}
    most = 8 * max(best.values())
    for number, (mtbf_s, interval) in enumerate(best.items()):
        intervals = sorted({max(1, round(most ** (step / INTERVALS))) for step in range(INTERVALS + 1)} | {interval})
        ratios = [GeminiCost(costs, mtbf_s, interval=candidate).analytic_ettr(mtbf_s) for candidate in intervals]
        axis.plot(
            intervals, ratios, label=f"a failure every {span(mtbf_s)}; best: {interval}",
            color=COLOURS[number % len(COLOURS)],
        )  # fmt: skip
        axis.plot(
            [interval], [GeminiCost(costs, mtbf_s).analytic_ettr(mtbf_s)], "o", color=COLOURS[number % len(COLOURS)]
        )
    axis.set(
        xlabel="iterations between checkpoints; with too few, sending stalls training", xscale="log",
        ylabel="effective training time ratio", title=f"4: gemini, by the formula ({cells[0].job})",
    )  # fmt: skip
    axis.xaxis.set_major_formatter("{x:g}")
    axis.legend(fontsize=8)
