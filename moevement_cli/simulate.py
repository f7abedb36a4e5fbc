"""Command ``moevement simulate``, which computes what failures cost under each checkpointing strategy."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moevement_cli.examples import SCENARIOS as SCENARIOS
from moevement_cli.examples import scenarios
from moevement_cli.jobs import scenarios_of
from moevement_cli.machines import add_machines
from moevement_cli.outputs import check_output
from moevement_cli.plan import ListPresets, presets
from moevement_cli.simulate_plot import draw
from moevement_cli.simulate_tables import print_advice, print_cells, print_headline
from moevement_cli.units import METAVAR, seconds
from moevement_cli.waiting import waiting
from moevement_core.errors import ConfigError
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.advice import Advice, Choice, Fixed, Variants, advise, fits, node_bytes
from moevement_core.simulator.costs import STRATEGIES
from moevement_core.simulator.experiment import Cell, run
from moevement_core.simulator.scenario import Scenario


def add_to(parser: argparse.ArgumentParser) -> None:
    """Set the description and arguments of ``moevement simulate``."""
    parser.allow_abbrev = False
    parser.description = (
        "Simulate hours of training with random or recorded failures, under several checkpointing strategies. Print "
        "the effective training time ratio, by formula and by simulation, and the parts of the lost time. WHAT is a "
        "scenario file, which describes the whole job, or a model as for moevement plan. The output compares several "
        "WHAT. Flags override the file. docs/scenarios.md explains every field and every assumption."
    )
    add = parser.add_argument
    add("what", nargs="+", metavar="WHAT",
        help="a scenario (a .yaml with a job, or a preset: " + ", ".join(scenarios())
        + "), or a model (a .yaml of Megatron's flags, or a preset: " + ", ".join(presets())
        + "), which needs --ranks, --iteration-time and a cluster")  # fmt: skip
    add("--list", action=ListPresets, nargs=0, help="list the presets of models with their descriptions, and exit")
    add("--ranks", type=int, nargs="+", metavar="N",
        help="GPUs of the job; several numbers give several jobs, which the output compares")  # fmt: skip
    add("--strategy", nargs="+", choices=list(STRATEGIES), metavar="NAME",
        help=f"strategies to simulate: {', '.join(STRATEGIES)}")  # fmt: skip
    add("--mtbf", type=seconds, nargs="+", metavar=METAVAR,
        help="mean time between failures of the job, such as 8h (default for a scenario: 2 h to 10 min, as in the "
        "paper; for a model: the failure rate per GPU of Llama 3's training)")  # fmt: skip
    add("--hours", type=float, metavar="H",
        help="hours of wall time (default for a scenario: 12; for a model: the time of 100 failures, at most a month)"
    )  # fmt: skip
    add_job(parser)
    add("--weibull", type=float, metavar="K",
        help="Weibull shape of times between failures: 1 is a Poisson process, below 1 failures come in bursts "
        "(default: 1)")  # fmt: skip
    add("--together", type=float, metavar="P",
        help="probability that the next node fails together with a failing node (default: 0)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="file of recorded failures, in place of random ones; a line is milliseconds,add|remove,NODE")  # fmt: skip
    add("--speedup", type=float, metavar="X", help="replay the trace X times as fast (default: 1)")
    add("--skew", type=float, metavar="S",
        help="skew of the experts' popularity: 0 is even, 1 sends all tokens to one expert (default: 0)")  # fmt: skip
    add("--workers", type=int, default=1, metavar="N",
        help="processes that simulate; more than 1 saves time only with thousands of trainings (default: 1)"
    )  # fmt: skip
    add("--best", action="store_true", help="recommend a strategy, window and interval, with reasons")
    add("--plot", type=Path, metavar="FILE", help="draw ETTR, lost time and progress (.png, .svg, .pdf)")
    parser.set_defaults(run=simulate, flags=[])


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job and its failures that ``moevement simulate`` and ``advise`` share."""
    add = parser.add_argument
    add("--iteration-time", type=seconds, metavar=METAVAR, help="time of an iteration, such as 2.5s, if it is known")
    add_machines(parser, has_defaults=False)
    add("--storage-bandwidth", type=float, metavar="GB/S", help="bandwidth of durable storage, all nodes together")
    add("--seeds", type=int, metavar="N", help="trainings per strategy and failure rate (default: 20)")
    add("--first-seed", type=int, metavar="N", help="seed of the first training; the next has N + 1 (default: 0)")
    add("--spares", type=int, metavar="N", help="spare nodes at the start (default: a spare is always free)")
    add("--repair", type=seconds, metavar=METAVAR,
        help="time until a failed node is repaired and becomes a spare (default: never)")  # fmt: skip
    add("--detect", type=seconds, metavar=METAVAR, help="time until a failure is noticed (default: 1s, assumed)")
    add("--regroup", type=seconds, metavar=METAVAR,
        help="time to rebuild process groups (default: 10s, assumed)")  # fmt: skip
    add(
        "--interference",
        type=float,
        metavar="F",
        help="seconds by which copies to the host lengthen training, for each second that they take (default: 0, "
        "assumed)",
    )
    add(
        "--contention",
        type=float,
        metavar="F",
        help="seconds by which copies to peers lengthen training, for each second that the copies would take on idle "
        "links (default: measured by the profile, else 0, assumed)",
    )


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate all jobs, print and draw the results, and return the exit code."""
    if arguments.workers < 1:
        raise ConfigError(f"--workers {arguments.workers}; needs 1 or more")
    check_output("--plot", arguments.plot)
    jobs = scenarios_of(arguments.what, arguments, (("speedup", "trace"), ("repair", "spares")))
    console = Console()
    cells: list[Cell] = []
    advice: list[tuple[Scenario, Advice]] = []
    for job in jobs:
        with waiting(f"{job.job.name} on {job.job.ranks} ranks: the plan of its checkpoints") as report:
            costs, draws = job.costs(), job.draws()
            trainings = sum(len(draw.failures) for draw in draws) * len(job.run.strategies)
            report(f"{job.job.name} on {job.job.ranks} ranks: {trainings} trainings of {job.run.hours:g} hours")
            own = run(
                costs,
                strategies=job.run.strategies,
                draws=draws,
                until_s=job.until_s,
                spares=job.spares(),
                workers=arguments.workers,
            )
            variants = Variants(costs)
            for drawn in draws if arguments.best else ():
                report(f"{job.job.name}: best interval of each strategy, for a failure every {drawn.mtbf_s:.0f} s")
                rows = [cell for cell in own if cell.mtbf_s == drawn.mtbf_s]
                advice.append(
                    (
                        job,
                        advise(
                            variants,
                            draws=drawn,
                            until_s=job.until_s,
                            spares=job.spares(),
                            rows=rows,
                            fixed=fixed_by(arguments),
                        ),
                    )
                )
        print_headline(console, job, costs)
        cells += own
    print_cells(console, cells, jobs)
    if advice:
        print_advice(console, advice)
    if arguments.plot is not None:
        draw(cells, arguments.plot)
        print(f"plot: {arguments.plot}")
    if arguments.json:
        results = {"results": [_as_json(cell) for cell in cells], "advice": [_advice_as_json(*pair) for pair in advice]}
        print(json.dumps(results))
    return 0


def fixed_by(arguments: argparse.Namespace) -> Fixed:
    """Return the choices that the command line fixes for the advice: the kind of window, and W."""
    return Fixed(None if arguments.window_kind is None else WindowKind(arguments.window_kind), arguments.window)


def _as_json(cell: Cell) -> dict[str, Any]:
    strategy = cell.strategy
    return {
        "job": cell.job, "ranks": cell.ranks, "mtbf_s": cell.mtbf_s, "strategy": strategy.name,
        "interval": strategy.interval, "window": strategy.costs.plan.size,
        "copies": strategy.costs.plan.inputs.replicas if strategy.in_memory else 0,
        "iteration_s": strategy.costs.iteration_s, "overhead_s": strategy.overhead_s,
        "copied_bytes": strategy.copied_bytes, "host_bytes": strategy.host_bytes,
        "host_bytes_of_node": node_bytes(strategy), "fits": fits(strategy),
        "expected_rollback": _finite(strategy.expected_rollback),
        "expected_recovery_s": _finite(strategy.expected_recovery_s()), "ettr_formula": cell.formula,
        "ettr": cell.ettr, "ettr_confidence": _finite(cell.interval), "lost": cell.lost,
        "failures": [outcome.failures for outcome in cell.outcomes],
        "during_recovery": [outcome.during_recovery for outcome in cell.outcomes],
        "from_storage": [outcome.from_storage for outcome in cell.outcomes],
        "iterations": [outcome.iterations for outcome in cell.outcomes],
        "tokens_lost": [outcome.tokens_lost for outcome in cell.outcomes],
        "goodput": [list(point) for point in cell.outcomes[0].goodput],
    }  # fmt: skip


def _advice_as_json(job: Scenario, advice: Advice) -> dict[str, Any]:
    return {
        "job": job.job.name, "ranks": job.job.ranks, "mtbf_s": advice.mtbf_s,
        "gain": advice.gain[0], "gain_confidence": _finite(advice.gain[1]),
        "choices": _choices_as_json(advice.choices), "by_copies": _choices_as_json(advice.by_copies),
    }  # fmt: skip


def _choices_as_json(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    return [
        {
            "strategy": choice.strategy.name, "flags": choice.flags, "ettr": choice.ettr, "copies": choice.copies,
            "interval": choice.strategy.interval,
            "window": choice.strategy.costs.plan.size if choice.is_sparse else None,
            "window_kind": str(choice.strategy.costs.plan.inputs.kind) if choice.is_sparse else None,
            "fits": choice.fits, "host_bytes_of_node": node_bytes(choice.strategy),
            "all_copies_lost_a_month": choice.lost_a_month,
        }
        for choice in choices
    ]  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
