"""``moevement simulate``: what a failure rate costs under each way of checkpointing."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_core.cli.plan import input_of
from moevement_core.cli.plotting import figure
from moevement_core.description.cluster import GB
from moevement_core.errors import ConfigError
from moevement_core.policy.plan import CheckpointPlan
from moevement_core.simulator.failures import Failure, FailureModel, mean_time_between, recorded
from moevement_core.simulator.strategies import STRATEGIES, Costs, Strategy
from moevement_core.simulator.training import Outcome, Spares, train


@dataclass(frozen=True)
class Cell:
    """One strategy at one failure rate, over all seeds."""

    strategy: Strategy
    mtbf_s: float
    outcomes: tuple[Outcome, ...]

    @property
    def ettr(self) -> float:
        """Mean of the trainings."""
        return statistics.fmean(one.ettr for one in self.outcomes)

    @property
    def interval(self) -> float:
        """Half of the 95% confidence interval of the mean."""
        if len(self.outcomes) < 2:
            return math.nan
        return 1.96 * statistics.stdev(one.ettr for one in self.outcomes) / math.sqrt(len(self.outcomes))

    @property
    def formula(self) -> float:
        """The analytical ratio."""
        return self.strategy.analytic_ettr(self.mtbf_s)

    @property
    def loses(self) -> float:
        """Updates that no checkpoint had, in iterations, mean of the trainings."""
        return statistics.fmean(one.tokens_lost for one in self.outcomes)

    @property
    def lost(self) -> dict[str, float]:
        """Share of wall time by what it went to, the largest first."""
        wall_s = sum(one.wall_s for one in self.outcomes)
        shares = {name: sum(one.lost_s[name] for one in self.outcomes) / wall_s for name in self.outcomes[0].lost_s}
        return dict(sorted(shares.items(), key=lambda one: -one[1]))


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, print, draw; returns the exit code."""
    _check(arguments)
    plan = CheckpointPlan(input_of(arguments))
    job = plan.given.job
    stages = job.pipeline_parallel
    costs = Costs(
        plan, arguments.storage_bandwidth * GB, arguments.detect, arguments.regroup,
        (stages - 1) / (job.micro_batches + stages - 1),
    )  # fmt: skip
    nodes = math.ceil(job.ranks / plan.given.cluster.gpus_per_node)
    cells = [
        _cell(name, mtbf_s, draws, costs, arguments)
        for mtbf_s, draws in _failures(arguments, nodes)
        for name in arguments.strategy
    ]
    console = Console()
    console.print(
        f"[bold]{job.name}[/bold] on {job.ranks} ranks ({job.layout}), {plan.given.iteration_s:g} s an iteration, "
        f"W = {plan.size}; {arguments.hours:g} hours, {len(cells[0].outcomes)} trainings of each kind; "
        f"{arguments.detect:g} s to detect, {arguments.regroup:g} s to regroup"
    )
    console.print(_table(cells))
    console.print(_lost_table(cells))
    if arguments.best:
        for line in _advice(cells):
            console.print(line)
    if arguments.plot is not None:
        draw(cells, arguments.plot)
        print(f"plot: {arguments.plot}")
    if arguments.json:
        print(json.dumps({"window": plan.size, "results": [_as_json(cell) for cell in cells]}))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--hours", arguments.hours, 0.0), ("--speedup", arguments.speedup, 0.0),
        ("--storage-bandwidth", arguments.storage_bandwidth, 0.0), *(("--mtbf", one, 0.0) for one in arguments.mtbf),
    ):  # fmt: skip
        if not least < value < math.inf:
            raise ConfigError(f"{flag} {value}; needs more than 0")
    for flag, value in (
        ("--detect", arguments.detect),
        ("--regroup", arguments.regroup),
        ("--repair", arguments.repair),
    ):
        if not value >= 0:
            raise ConfigError(f"{flag} {value}; needs 0 or more")
    if arguments.seeds < 1 or (arguments.spares is not None and arguments.spares < 0):
        raise ConfigError(f"--seeds {arguments.seeds} --spares {arguments.spares}; needs 1 or more, and 0 or more")


def _failures(arguments: argparse.Namespace, nodes: int) -> list[tuple[float, list[list[Failure]]]]:
    """By mean time between failures: those of each training."""
    until_s = arguments.hours * 3600
    if arguments.trace is not None:
        found = [one for one in recorded(arguments.trace, nodes, arguments.speedup) if one.at_s < until_s]
        if not found:
            raise ConfigError(
                f"--trace {arguments.trace}: no failure in {arguments.hours:g} hours at --speedup "
                f"{arguments.speedup:g}; needs one at least"
            )
        return [(mean_time_between(found, until_s), [found])]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    models = [FailureModel(mtbf_s, nodes, arguments.weibull, arguments.together) for mtbf_s in arguments.mtbf]
    return [(model.mtbf_s, [model.draw(until_s, seed) for seed in seeds]) for model in models]


def _cell(
    name: str, mtbf_s: float, draws: Sequence[list[Failure]], costs: Costs, arguments: argparse.Namespace
) -> Cell:
    # A strategy may change in a training: each has its own.
    made = tuple(
        train(
            STRATEGIES[name](costs, mtbf_s),
            failures,
            arguments.hours * 3600,
            Spares(arguments.spares, arguments.repair),
        )
        for failures in draws
    )
    return Cell(STRATEGIES[name](costs, mtbf_s), mtbf_s, made)


def _table(cells: Sequence[Cell]) -> Table:
    table = Table("MTBF", "strategy", "every", "overhead", "E[R]", "ETTR by formula", "simulated")
    for cell in cells:
        strategy = cell.strategy
        table.add_row(
            _span(cell.mtbf_s), strategy.name, str(strategy.interval or "never"),
            f"{strategy.overhead_s / strategy.costs.iteration_s:.1%}", f"{strategy.expected_recovery_s():.1f} s",
            f"{cell.formula:.3f}",
            f"{cell.ettr:.3f} ± {cell.interval:.3f}" if len(cell.outcomes) > 1 else f"{cell.ettr:.3f}",
        )  # fmt: skip
    return table


def _lost_table(cells: Sequence[Cell]) -> Table:
    """Where the time went at the highest failure rate."""
    worst = min(cell.mtbf_s for cell in cells)
    here = [cell for cell in cells if cell.mtbf_s == worst]
    table = Table(f"lost, a failure every {_span(worst)}", *(cell.strategy.name for cell in here))
    for part in here[0].outcomes[0].lost_s:
        table.add_row(part, *(f"{cell.lost[part]:.2%}" for cell in here))
    table.add_row("failures", *(f"{statistics.fmean(one.failures for one in cell.outcomes):.1f}" for cell in here))
    table.add_row(
        "of them in a recovery",
        *(f"{statistics.fmean(one.during_recovery for one in cell.outcomes):.1f}" for cell in here),
    )
    return table


def _advice(cells: Sequence[Cell]) -> list[str]:
    """The best that loses no update, by failure rate; what would be faster and loses some is named."""
    lines = []
    for mtbf_s in dict.fromkeys(cell.mtbf_s for cell in cells):
        here = sorted((cell for cell in cells if cell.mtbf_s == mtbf_s), key=lambda cell: (cell.loses > 0, -cell.ettr))
        best, strategy = here[0], here[0].strategy
        every = f", every {strategy.interval} iterations" if strategy.interval > 1 else ""
        lines.append(
            f"a failure every {_span(mtbf_s)}: [bold]{strategy.name}[/bold]{every}, ETTR {best.ettr:.3f}; "
            f"{strategy.overhead_s / strategy.costs.iteration_s:.1%} of overhead, {strategy.expected_rollback:.1f} "
            "iterations computed again after a failure"
        )
        for cell in here[1:]:
            loses = f", and loses the updates of {cell.loses:.0f} iterations" if cell.loses else ""
            lines.append(f"    {cell.strategy.name} {cell.ettr:.3f}: most lost to {next(iter(cell.lost))}{loses}")
    return lines


def _as_json(cell: Cell) -> dict[str, Any]:
    strategy = cell.strategy
    return {
        "mtbf_s": cell.mtbf_s, "strategy": strategy.name, "interval": strategy.interval,
        "overhead_s": strategy.overhead_s, "expected_rollback": _finite(strategy.expected_rollback),
        "expected_recovery_s": _finite(strategy.expected_recovery_s()), "ettr_formula": cell.formula,
        "ettr": cell.ettr, "ettr_confidence": _finite(cell.interval), "lost": cell.lost,
        "failures": [one.failures for one in cell.outcomes],
        "during_recovery": [one.during_recovery for one in cell.outcomes],
        "iterations": [one.iterations for one in cell.outcomes],
        "tokens_lost": [one.tokens_lost for one in cell.outcomes],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _span(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "never"
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds / 60:.3g} min"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """ETTR over the failure rate, what the time went to at the highest one, and iterations over time there."""
    with figure(path, 3, (14, 4)) as axes:
        worst = min(cell.mtbf_s for cell in cells)
        bottom = dict.fromkeys((cell.strategy.name for cell in cells), 0.0)
        for name in bottom:
            own = [cell for cell in cells if cell.strategy.name == name]
            axes[0].errorbar(
                [cell.mtbf_s / 60 for cell in own], [cell.ettr for cell in own], marker="o", label=name,
                yerr=[cell.interval if len(cell.outcomes) > 1 else 0 for cell in own],
            )  # fmt: skip
            first = next(cell for cell in own if cell.mtbf_s == worst).outcomes[0]
            points = [(0.0, 0), *first.goodput]
            axes[2].plot([at / 3600 for at, _ in points], [count for _, count in points], label=name)
        here = [cell for cell in cells if cell.mtbf_s == worst]
        for part in here[0].lost:
            shares = [cell.lost[part] for cell in here]
            axes[1].bar(list(bottom), shares, bottom=list(bottom.values()), label=part)
            bottom = {name: below + share for (name, below), share in zip(bottom.items(), shares, strict=True)}
        axes[0].set(xlabel="mean time between failures, minutes", title="ETTR", ylim=(0, 1), xscale="log")
        axes[1].set(title=f"share of time lost, a failure every {_span(worst)}")
        axes[1].tick_params(axis="x", rotation=30)
        axes[2].set(xlabel="hours", title="iterations committed, first seed there")
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
