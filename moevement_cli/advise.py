"""Command ``moevement advise``, which estimates what fault tolerance costs and saves a job in a month."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from moevement_cli.examples import scenarios
from moevement_cli.jobs import scenarios_of
from moevement_cli.machines import copies_get
from moevement_cli.plan import ListPresets, presets
from moevement_cli.simulate import add_job
from moevement_cli.units import METAVAR, seconds, span
from moevement_cli.waiting import waiting
from moevement_core.errors import ConfigError
from moevement_core.planning.cluster import GB
from moevement_core.simulator.advice import family, fits, node_bytes
from moevement_core.simulator.costs import MoEvementCost
from moevement_core.simulator.experiment import Draws
from moevement_core.simulator.failure_rate import SOURCE, mean_time_between_failures_s
from moevement_core.simulator.failures import FailureModel, check_count
from moevement_core.simulator.scenario import Checkpointing, Scenario
from moevement_core.simulator.worth import LEAST_SHARE, MONTH_H, Way, Worth, worth
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Range

RESTART_S, REPAIR_S = 600.0, 86_400.0
"""Defaults in seconds: 10 minutes until a failed job has started again, a day until a node is repaired."""
NAME_WIDTH = 18
"""Maximum width of the column of names, in characters, so that the table fits on a terminal of 80 columns."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Set the description and arguments of ``moevement advise``."""
    parser.allow_abbrev = False
    parser.description = (
        "Estimate the GPU hours that a job loses in a month. The command compares today's restarts from dense "
        "checkpoints in storage with each strategy of this project. Idle spares count as lost hours. The command also "
        "prints whether you need fault tolerance, and the lowest failure rate at which it pays. WHAT is a model as for "
        "moevement plan, or a scenario. docs/worth_it.md has an example. docs/sizing.md explains how to measure the "
        "inputs."
    )
    add = parser.add_argument
    add(
        "what", metavar="WHAT",
        help=f"a YAML file of Megatron's flags, a preset ({', '.join(presets())}), or a scenario "
        f"({', '.join(scenarios())})",
    )  # fmt: skip
    add("--list", action=ListPresets, nargs=0, help="list the presets of models with their descriptions, and exit")
    add("--ranks", type=int, metavar="N", help="number of GPUs of the job")
    add("--mtbf", type=seconds, metavar=METAVAR,
        help="mean time between failures of the job, as 200h (default: from Llama 3's rate per GPU)")  # fmt: skip
    add(
        "--save-every",
        type=int,
        metavar="K",
        help="iterations between two dense checkpoints today (default: the number with the fewest lost GPU hours)",
    )
    add("--restart", type=seconds, metavar=METAVAR,
        help="time today from a failure until the restarted job loads its checkpoint (default: 10m)")  # fmt: skip
    add_job(parser)
    parser.set_defaults(run=advise, flags=[])


def advise(arguments: argparse.Namespace) -> int:
    """Print what a month costs with each strategy, and return the exit code."""
    AT_LEAST_ONE.check("--save-every", arguments.save_every)
    NOT_NEGATIVE.check("--restart", arguments.restart)
    NOT_NEGATIVE.check("--spares", arguments.spares)
    POSITIVE.check("--mtbf", arguments.mtbf)
    Range(0.0, or_infinite=True).check("--repair", arguments.repair)
    if arguments.window is not None or arguments.window_kind is not None:
        raise ConfigError("--window and --window-kind: advise chooses them; leave them out, or use moevement simulate")
    (job,) = scenarios_of([arguments.what], arguments)
    mtbf_s = arguments.mtbf or mean_time_between_failures_s(job.job.ranks)
    check_count(mtbf_s, MONTH_H * 3600, job.run.seeds)
    restart_s = RESTART_S if arguments.restart is None else arguments.restart
    repair_s = REPAIR_S if arguments.repair is None else arguments.repair
    with waiting(f"{job.job.name} on {job.job.ranks} GPUs: {job.run.seeds} months with each strategy"):
        costs = job.costs()
        model = FailureModel(mtbf_s, costs.plan.inputs.nodes)
        seeds = range(job.run.first_seed, job.run.first_seed + job.run.seeds)
        draws = Draws(mtbf_s, tuple(model.draw(MONTH_H * 3600, seed) for seed in seeds))
        result = worth(
            costs, draws, restart_s=restart_s, every=arguments.save_every, spares=arguments.spares, repair_s=repair_s
        )
    console = Console()
    for sentence in _verdict(result):
        console.print(sentence)
    console.print(_table(job, result))
    for sentence in _assumed(job, result, arguments=arguments, restart_s=restart_s, repair_s=repair_s):
        console.print(sentence)
    if arguments.json:
        print(json.dumps(_as_json(job, result)))
    return 0


def _verdict(result: Worth) -> Iterator[str]:
    best = result.strategies[0]
    way = f"{family(best.strategy)} with {best.spares} spare node{'s' * (best.spares != 1)}"
    if not fits(best.strategy):
        yield "[bold red]Not with these nodes[/bold red]: no strategy fits into the host memory of a node."
    elif result.pays:
        yield f"[bold]It pays[/bold]: {way} {_saved(result.today[0], best, result.saved_interval_h)}."
        yield f"Flags: {best.name}"
    else:
        yield (
            f"[bold]You do not need this[/bold]: even the cheapest strategy, {way}, "
            f"{_saved(result.today[0], best, result.saved_interval_h)}."
        )
    if result.at_user_interval is not None and result.at_user_interval is not result.today[0]:
        yield f"At your present interval, the best strategy {_saved(result.at_user_interval, best)}."
    least = f"{LEAST_SHARE:.1%} of the job's GPU hours"
    if result.break_even_s == 0:
        yield f"At no failure rate would the best strategy save {least}."
    elif math.isinf(result.break_even_s):
        yield f"At any failure rate the best strategy saves {least}."
    else:
        yield (
            f"Break-even: the best strategy saves {least} if failures are {span(result.break_even_s)} apart or less; "
            f"yours are {span(result.mtbf_s)} apart."
        )


def _saved(today: Way, best: Way, interval_h: float = math.nan) -> str:
    saved_h, all_h = today.total_h - best.total_h, today.gpus * MONTH_H
    margin = f" ± {interval_h:,.0f}" if math.isfinite(interval_h) else ""
    verb, over = ("saves", "over") if saved_h >= 0 else ("costs", "more than")
    name = today.name.partition(",")[0]
    return (
        f"{verb} {abs(saved_h):,.0f}{margin} of {all_h:,.0f} GPU hours a month ({abs(saved_h) / all_h:.2%}) {over} "
        f"{name} every {today.strategy.interval:,} iterations"
    )


def _table(job: Scenario, result: Worth) -> Table:
    gpus = job.job.ranks
    table = Table(
        Column("", overflow="fold", max_width=NAME_WIDTH),
        *(Column(name, no_wrap=True) for name in ("every", "saving", "failures", "spares", "lost", "%")),
        Column("GB", overflow="fold"),
        box=SIMPLE_HEAD, pad_edge=False,
        title=f"GPU hours lost a month, {job.job.name} on {gpus:,} GPUs, a failure every {span(result.mtbf_s)}",
        caption="every: iterations between saves, or W; saving: what checkpoints add; failures: work cut off or "
        "repeated, waiting, recovering; spares: idle nodes; GB: host memory of a node",
    )  # fmt: skip
    for way in (*result.today, *result.strategies):
        is_ours = way in result.strategies
        sparse = isinstance(way.strategy, MoEvementCost)
        if way is result.strategies[0]:
            table.add_section()
        table.add_row(
            family(way.strategy) if is_ours else way.name,
            f"W {way.strategy.costs.plan.size}" if sparse else f"{way.strategy.interval:,}",
            f"{way.saving_h:,.0f}", f"{way.failing_h:,.0f}", f"{way.spares_h:,.0f}", f"{way.total_h:,.0f}",
            f"{way.total_h / (gpus * MONTH_H):.2%}",
            f"{node_bytes(way.strategy) / GB:,.0f}" + ("" if fits(way.strategy) else ", does not fit"),
            style="bold" if way in (result.today[0], result.strategies[0]) else "",
        )  # fmt: skip
    return table


def _assumed(
    job: Scenario, result: Worth, arguments: argparse.Namespace, restart_s: float, repair_s: float
) -> Iterator[str]:
    """Yield sentences with the assumptions behind the numbers, and the source of each."""
    saved, best = job.checkpointing, result.strategies[0]

    def source(flag: str, is_default: bool = True) -> str:
        return f"assumed, --{flag}" if is_default and getattr(arguments, flag) is None else "given"

    usual = Checkpointing()
    rate = "given" if arguments.mtbf is not None else f"{SOURCE}; --mtbf gives yours"
    yield f"A failure every {span(result.mtbf_s)}: {rate}."
    yield (
        f"The scheduler gives another node {span(restart_s)} after a failure. A restarted job loads its checkpoint at "
        f"that time ({source('restart')}). With 0 spares, each strategy waits until somebody adds a new node, at "
        f"most for --spare-timeout (docs/runbook.md, No spare is left). "
        f"Here a failure is noticed in {saved.detect_s:g} s ({source('detect', saved.detect_s == usual.detect_s)}) and "
        f"ranks regroup in {saved.regroup_s:g} s ({source('regroup', saved.regroup_s == usual.regroup_s)}; not "
        f"measured on GPUs); a failed node is a spare again after {span(repair_s)} ({source('repair')})."
    )
    storage = job.cluster.storage_bytes_per_s
    assert storage is not None, "a scenario has the bandwidth of storage"
    yield (
        f"{_sentence(copies_get(job.cluster))}. Storage takes {storage / GB:g} GB/s. Copies to the host delay "
        f"training by {saved.interference:g} of the time that they take "
        f"({source('interference', saved.interference == usual.interference)}). Copies to peers delay "
        f"training by {job.contention:g} of the time that they would take on an idle link "
        f"({source('contention', job.contention == 0)})."
    )
    memory = job.cluster.host_memory_bytes
    if memory is not None:
        used = node_bytes(best.strategy)
        yield (
            f"Host memory: {used / GB:,.0f} of {memory / GB:,.0f} GB of a node. The estimate ignores the cost of "
            "this memory."
        )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _as_json(job: Scenario, result: Worth) -> dict[str, Any]:
    return {
        "job": job.job.name, "gpus": job.job.ranks, "mtbf_s": result.mtbf_s, "hours": MONTH_H, "pays": result.pays,
        "saved_gpu_hours": result.saved_h,
        "saved_confidence": result.saved_interval_h if math.isfinite(result.saved_interval_h) else None,
        "break_even_mtbf_s": result.break_even_s if math.isfinite(result.break_even_s) else None,
        "today": [_way_as_json(way) for way in result.today], "ours": [_way_as_json(way) for way in result.strategies],
    }  # fmt: skip


def _way_as_json(way: Way) -> dict[str, Any]:
    strategy = way.strategy
    return {
        "name": way.name, "strategy": strategy.name, "interval": strategy.interval,
        "window": strategy.costs.plan.size if isinstance(strategy, MoEvementCost) else None, "spares": way.spares,
        "saving_gpu_hours": way.saving_h, "failing_gpu_hours": way.failing_h, "spares_gpu_hours": way.spares_h,
        "lost_gpu_hours": way.total_h, "ettr": way.cell.ettr, "host_bytes_of_node": node_bytes(strategy),
        "fits": fits(strategy),
    }  # fmt: skip
