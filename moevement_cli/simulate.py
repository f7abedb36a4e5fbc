"""``moevement simulate``: what a failure rate costs under each way of checkpointing."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from moevement_cli.examples import EXAMPLES
from moevement_cli.machines import add_machines
from moevement_cli.plan import config_path, input_of
from moevement_cli.plotting import figure
from moevement_core import precision
from moevement_core.description.cluster import CLUSTERS, GB
from moevement_core.errors import ConfigError
from moevement_core.simulator import scenario
from moevement_core.simulator.advice import Advice, advise, reasons
from moevement_core.simulator.experiment import Cell, run
from moevement_core.simulator.iteration import IterationTime
from moevement_core.simulator.scenario import Scenario
from moevement_core.simulator.strategies import STRATEGIES, Gemini

SCENARIOS = EXAMPLES / "simulate"
INTERVALS = 40
"""Points of the plot of ETTR over the interval."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Its description and arguments."""
    parser.allow_abbrev = False
    parser.description = (
        "Hours of a training with failures, drawn or recorded, under several ways of checkpointing: the "
        "effective training time ratio by the formula and by simulation, and where the rest of the time went. WHAT is "
        "a scenario file, which says everything, or a model as for moevement plan; several are compared. What stands "
        "on the command line wins over the file. docs/simulator.md has every field, and says what is assumed."
    )
    add = parser.add_argument
    add("what", nargs="+", metavar="WHAT",
        help="a scenario (deepseek_671b, ..., or a .yaml with a job), or a model by Megatron's flags with --ranks, "
        "--iteration-time and a cluster")  # fmt: skip
    add("--ranks", type=int, nargs="+", metavar="N", help="GPUs of the job; several are compared")
    add("--iteration-time", type=float, metavar="S", help="seconds of an iteration, if it is known")
    add_machines(parser, has_defaults=False)
    add("--mtbf", type=float, nargs="+", metavar="S",
        help="mean seconds between failures of the job (default: the paper's 2 h to 10 min)")  # fmt: skip
    add("--strategy", nargs="+", choices=list(STRATEGIES), metavar="NAME", help=f"any of {', '.join(STRATEGIES)}")
    add("--hours", type=float, metavar="H", help="of wall time (default: 12)")
    add("--seeds", type=int, metavar="N", help="trainings of each kind (default: 20)")
    add("--first-seed", type=int, metavar="N", help="the others follow (default: 0)")
    add("--weibull", type=float, metavar="K",
        help="shape of the time between failures: 1 is a Poisson process, less gives bursts (default: 1)")  # fmt: skip
    add("--together", type=float, metavar="P",
        help="probability that a failing node takes the next one along (default: 0)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="recorded failures instead of drawn ones: lines of milliseconds,add|remove,NODE")  # fmt: skip
    add("--speedup", type=float, metavar="X", help="let the trace run X times as fast (default: 1)")
    add("--spares", type=int, metavar="N", help="spare nodes at the start (default: always one more)")
    add("--repair", type=float, metavar="S",
        help="seconds after which a failed node is a spare again (default: never)")  # fmt: skip
    add("--detect", type=float, metavar="S", help="until a failure is noticed (default: 1)")
    add("--regroup", type=float, metavar="S", help="until process groups are there again (default: 10)")
    add("--interference", type=float, metavar="F",
        help="share of the seconds of copies beside training by which they lengthen it (default: 0)")  # fmt: skip
    add("--skew", type=float, metavar="S", help="of the popularity of experts, 0 to 1 (default: 0)")
    add("--storage-bandwidth", type=float, metavar="GB/S", help="to durable storage, all nodes together")
    add("--workers", type=int, default=1, metavar="N", help="processes; more pay from thousands of trainings on")
    add("--best", action="store_true", help="propose strategy, window, replicas and interval, with reasons")
    add("--plot", type=Path, metavar="FILE", help="ETTR over failure rate and interval, lost time, goodput")
    parser.set_defaults(run=simulate, flags=[])


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, print, draw; returns the exit code."""
    given = [_overridden(one, arguments) for name in arguments.what for one in _scenarios(name, arguments)]
    if arguments.workers < 1:
        raise ConfigError(f"--workers {arguments.workers}; needs 1 or more")
    console = Console()
    cells: list[Cell] = []
    for one in given:
        costs = one.costs()
        cells += run(costs, one.run.strategies, one.draws(), one.until_s, one.spares(), arguments.workers)
        console.print(_headline(one, costs.time, costs.plan.size, len(cells[-1].outcomes)))
    console.print(_table(cells))
    for here in _worst(cells):
        console.print(_lost_table(here))
        console.print(_counted_table(here))
    if arguments.best:
        for one in given:
            for mtbf_s in dict.fromkeys(draws.mtbf_s for draws in one.draws()):
                for line in _advice(one, advise(one.costs(), mtbf_s, one.failures.together)):
                    console.print(line)
    if arguments.plot is not None:
        draw(cells, arguments.plot)
        print(f"plot: {arguments.plot}")
    if arguments.json:
        print(json.dumps({"results": [_as_json(cell) for cell in cells]}))
    return 0


def scenario_path(name: str) -> Path | None:
    """The file of a scenario, by its path or a preset's name; None if it is a model that Megatron describes."""
    for path in (Path(name), SCENARIOS / f"{name}.yaml"):
        if path.is_file():
            return path if scenario.is_scenario(path) else None
    return None


def _scenarios(name: str, arguments: argparse.Namespace) -> Iterator[Scenario]:
    path = scenario_path(name)
    ranks = arguments.ranks or []
    if path is not None:
        if arguments.flags:
            raise ConfigError(
                f"{' '.join(arguments.flags)}: neither a flag of moevement simulate nor a field of {path.name}, and "
                "Megatron's flags go with a model by Megatron's flags"
            )
        for count in ranks or [None]:
            yield scenario.load(path, ranks=count)
        return
    _check_known(name)
    if not ranks or arguments.iteration_time is None:
        raise ConfigError(f"{name} is a model by Megatron's flags; it needs --ranks and --iteration-time too")
    for count in ranks:
        filled = {
            "model": name, "ranks": count, "window_kind": arguments.window_kind or "aligned",
            "replicas": 2 if arguments.replicas is None else arguments.replicas,
            "fp8_scaling": arguments.fp8_scaling or "tensor", "windows_on_disk": False,
        }  # fmt: skip
        described = input_of(argparse.Namespace(**{**vars(arguments), **filled}))
        cluster = described.cluster
        if cluster.storage_bytes_per_s is None and arguments.storage_bandwidth is not None:
            cluster = replace(cluster, storage_bytes_per_s=arguments.storage_bandwidth * GB)
        yield Scenario(
            replace(described.job, regime=described.regime), cluster, described.iteration_s,
            checkpointing=scenario.Checkpointing(
                window_kind=str(described.kind), window=described.window, replicas=described.replicas
            ),
        )  # fmt: skip


def _check_known(name: str) -> None:
    try:
        config_path(name)
    except ConfigError as error:
        known = ", ".join(sorted(path.stem for path in SCENARIOS.glob("*.yaml")))
        raise ConfigError(f"{error}; scenarios are {known or 'none, in this installation'}") from None


def _overridden(given: Scenario, arguments: argparse.Namespace) -> Scenario:
    """Command-line flags take precedence over the file."""

    def changed(base: Any, **values: Any) -> Any:
        return replace(base, **{name: value for name, value in values.items() if value is not None})

    def tupled(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
        return None if values is None else tuple(values)

    def bytes_of(value: float | None) -> float | None:
        return None if value is None else value * GB

    regime = given.job.regime if arguments.regime is None else precision.parse(arguments.regime)
    if arguments.fp8_scaling is not None:
        regime = replace(regime, scaling=precision.Scaling(arguments.fp8_scaling))
    return changed(
        given,
        job=replace(given.job, regime=regime),
        iteration_s=arguments.iteration_time,
        cluster=changed(
            CLUSTERS[arguments.cluster] if arguments.cluster else given.cluster,
            storage_bytes_per_s=bytes_of(arguments.storage_bandwidth),
            d2h_bytes_per_s=bytes_of(arguments.d2h_bandwidth),
            network_bytes_per_s=bytes_of(arguments.network_bandwidth),
            host_memory_bytes=bytes_of(arguments.host_memory),
            network_share=arguments.network_share, gpus_per_node=arguments.gpus_per_node,
        ),
        checkpointing=changed(
            given.checkpointing, detect_s=arguments.detect, regroup_s=arguments.regroup, skew=arguments.skew,
            interference=arguments.interference, replicas=arguments.replicas, window=arguments.window,
            window_kind=arguments.window_kind,
        ),
        failures=changed(
            given.failures, mtbf_s=tupled(arguments.mtbf), weibull=arguments.weibull, together=arguments.together,
            trace=None if arguments.trace is None else str(arguments.trace), speedup=arguments.speedup,
            spares=arguments.spares, repair_s=arguments.repair,
        ),
        run=changed(
            given.run, strategies=tupled(arguments.strategy), hours=arguments.hours, seeds=arguments.seeds,
            first_seed=arguments.first_seed,
        ),
    )  # fmt: skip


def _headline(one: Scenario, time: IterationTime, window: int, trainings: int) -> str:
    job, saved = one.job, one.checkpointing
    alone = max(time.segment_s([stage]) for stage in range(time.stages))
    return (
        f"[bold]{job.name}[/bold] on {job.ranks} ranks ({job.layout}), {time.total_s:.3g} s an iteration (closed form "
        f"{time.closed_form_s:.3g} s), {alone:.3g} s for a stage alone; W = {window}; {one.run.hours:g} hours, "
        f"{trainings} trainings of each kind; {saved.detect_s:g} s to detect, {saved.regroup_s:g} s to regroup"
    )


def _table(cells: Sequence[Cell]) -> Table:
    jobs = _jobs(cells)
    table = Table("MTBF", _kept("strategy"), "every", "overhead", "E[R]", "by formula", "ETTR, simulated")
    for cell in cells:
        strategy = cell.strategy
        table.add_row(
            _span(cell.mtbf_s), _name(cell, jobs), str(strategy.interval or "never"),
            f"{strategy.overhead_s / strategy.costs.iteration_s:.1%}", f"{strategy.expected_recovery_s():.1f} s",
            f"{cell.formula:.3f}",
            f"{cell.ettr:.3f} ± {cell.interval:.3f}" if len(cell.outcomes) > 1 else f"{cell.ettr:.3f}",
        )  # fmt: skip
    return table


def _jobs(cells: Sequence[Cell]) -> int:
    return len({(cell.job, cell.ranks) for cell in cells})


def _name(cell: Cell, jobs: int) -> str:
    """Of the strategy, and of the job where there are several."""
    return cell.strategy.name if jobs == 1 else f"{cell.strategy.name}, {cell.job} on {cell.ranks}"


def _worst(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Of each job, its cells at the highest failure rate."""
    for job in dict.fromkeys((cell.job, cell.ranks) for cell in cells):
        own = [cell for cell in cells if (cell.job, cell.ranks) == job]
        worst = min(cell.mtbf_s for cell in own)
        yield [cell for cell in own if cell.mtbf_s == worst]


def _kept(header: str) -> Column:
    """A column that is not abbreviated where the console is narrow."""
    return Column(header, no_wrap=True)


PARTS = {
    "checkpointing": "saving", "interrupted": "interrupted", "detect": "detect", "no spare": "no spare",
    "regroup": "regroup", "fetch": "fetch", "convert": "convert", "catch up": "catch up",
}  # fmt: skip


def _lost_table(here: Sequence[Cell]) -> Table:
    """Where the time went, percent of it."""
    table = Table(_kept("% lost to"), *PARTS.values(), title=_rate(here))
    for cell in here:
        table.add_row(cell.strategy.name, *(f"{100 * cell.lost[part]:.2f}" for part in PARTS))
    return table


def _counted_table(here: Sequence[Cell]) -> Table:
    """What is copied and kept, and what failures met."""
    table = Table(
        _kept(""), "copied in an iteration", "host memory of a rank", "failures", "in a recovery", "from storage",
        "iterations' updates lost", title=_rate(here),
    )  # fmt: skip
    for cell in here:
        table.add_row(
            cell.strategy.name, f"{cell.strategy.copied_bytes / GB:.3g} GB", f"{cell.strategy.host_bytes / GB:.3g} GB",
            *(
                f"{statistics.fmean(getattr(one, counted) for one in cell.outcomes):.1f}"
                for counted in ("failures", "during_recovery", "from_storage", "tokens_lost")
            ),
        )  # fmt: skip
    return table


def _rate(here: Sequence[Cell]) -> str:
    return f"{here[0].job}, {here[0].ranks} ranks, a failure every {_span(here[0].mtbf_s)}"


def _advice(one: Scenario, advice: Advice) -> Iterator[str]:
    mtbf_s, best = advice.mtbf_s, advice.best
    yield (
        f"{one.job.name}, {one.job.ranks} ranks, a failure every {_span(mtbf_s)}: [bold]{best.flags}[/bold], "
        f"ETTR {best.ettr(mtbf_s):.3f}"
    )
    for reason in reasons(best, mtbf_s):
        yield f"    {reason}"
    if advice.sparse is not best:
        yield f"    of sparse checkpoints: [bold]{advice.sparse.flags}[/bold], ETTR {advice.sparse.ettr(mtbf_s):.3f}"
    told = ", ".join(
        f"{other.strategy.name} {other.ettr(mtbf_s):.3f}"
        + (f" (every {other.strategy.interval})" if other.strategy.interval > 1 else "")
        for other in advice.others
    )
    yield f"    the best of others: {told}"
    lossy = ", ".join(f"{other.name} {other.analytic_ettr(mtbf_s):.3f}" for other in advice.lossy)
    yield f"    not proposed, because they lose the updates of experts: {lossy}"


def _as_json(cell: Cell) -> dict[str, Any]:
    strategy = cell.strategy
    return {
        "job": cell.job, "ranks": cell.ranks, "mtbf_s": cell.mtbf_s, "strategy": strategy.name,
        "interval": strategy.interval, "window": strategy.costs.plan.size,
        "iteration_s": strategy.costs.iteration_s, "overhead_s": strategy.overhead_s,
        "copied_bytes": strategy.copied_bytes, "host_bytes": strategy.host_bytes,
        "expected_rollback": _finite(strategy.expected_rollback),
        "expected_recovery_s": _finite(strategy.expected_recovery_s()), "ettr_formula": cell.formula,
        "ettr": cell.ettr, "ettr_confidence": _finite(cell.interval), "lost": cell.lost,
        "failures": [one.failures for one in cell.outcomes],
        "during_recovery": [one.during_recovery for one in cell.outcomes],
        "from_storage": [one.from_storage for one in cell.outcomes],
        "iterations": [one.iterations for one in cell.outcomes],
        "tokens_lost": [one.tokens_lost for one in cell.outcomes],
        "goodput": [list(point) for point in cell.outcomes[0].goodput],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _span(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "never"
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds / 60:.3g} min"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """ETTR over failure rate and interval, what the time went to at the highest rate, and goodput there."""
    with figure(path, 4, (20, 4.5)) as axes:
        worst = min(cell.mtbf_s for cell in cells)
        lines: dict[str, list[Cell]] = {}
        for cell in cells:
            lines.setdefault(_name(cell, _jobs(cells)), []).append(cell)
        for name, own in lines.items():
            axes[0].errorbar(
                [cell.mtbf_s / 60 for cell in own], [cell.ettr for cell in own], marker="o", label=name,
                yerr=[cell.interval if len(cell.outcomes) > 1 else 0 for cell in own],
            )  # fmt: skip
            last = min(own, key=lambda cell: cell.mtbf_s)
            points = [(0.0, 0), *last.outcomes[0].goodput]
            axes[3].plot([at / 3600 for at, _ in points], [count for _, count in points], label=name)
        here = {name: min(own, key=lambda cell: cell.mtbf_s) for name, own in lines.items()}
        bottom = dict.fromkeys(here, 0.0)
        for part in PARTS:
            shares = {name: cell.lost[part] for name, cell in here.items()}
            axes[2].bar(list(here), list(shares.values()), bottom=list(bottom.values()), label=part)
            bottom = {name: below + shares[name] for name, below in bottom.items()}
        _draw_intervals(cells, axes[1])
        axes[0].set(xlabel="mean time between failures, minutes", title="ETTR", ylim=(0, 1), xscale="log")
        axes[2].set(title=f"share of time lost, a failure every {_span(worst)}")
        axes[2].tick_params(axis="x", rotation=30)
        axes[3].set(xlabel="hours", title="iterations committed, first seed there")
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)


def _draw_intervals(cells: Sequence[Cell], axis: Any) -> None:
    """Dense checkpoints in peers' memory of the first job, by the formula; its sparse ones have no interval."""
    costs = cells[0].strategy.costs
    for mtbf_s in dict.fromkeys(cell.mtbf_s for cell in cells):
        best = Gemini(costs, mtbf_s).interval
        intervals = sorted(
            {max(1, round(8 * best ** (step / (INTERVALS / 2)) / 8)) for step in range(INTERVALS)} | {best}
        )
        ratios = [Gemini(costs, mtbf_s, interval=one).analytic_ettr(mtbf_s) for one in intervals]
        axis.plot(intervals, ratios, label=f"a failure every {_span(mtbf_s)}, best {best}")
    axis.set(xlabel="iterations between dense checkpoints in memory", xscale="log", ylim=(0, 1), title="ETTR (gemini)")
