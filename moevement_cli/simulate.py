"""Command ``moevement simulate``, which computes what failures cost under each checkpointing strategy."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moevement_cli.jobs import SCENARIOS as SCENARIOS
from moevement_cli.jobs import scenarios, scenarios_of
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
from moevement_core.simulator.experiment import Cell, run
from moevement_core.simulator.scenario import Scenario
from moevement_core.simulator.strategies import STRATEGIES


def add_to(parser: argparse.ArgumentParser) -> None:
    """Set the description and arguments of the command."""
    parser.allow_abbrev = False
    parser.description = (
        "Hours of a training with failures, drawn or recorded, under several ways of checkpointing: the "
        "effective training time ratio by the formula and by simulation, and where the rest of the time went. WHAT is "
        "a scenario file, which says everything, or a model as for moevement plan; several are compared. What stands "
        "on the command line wins over the file. docs/scenarios.md has every field, and says what is assumed."
    )
    add = parser.add_argument
    add("what", nargs="+", metavar="WHAT",
        help="a scenario (a .yaml with a job, or a preset: " + ", ".join(scenarios())
        + "), or a model by Megatron's flags (a .yaml, or " + ", ".join(presets())
        + ") with --ranks, --iteration-time and a cluster")  # fmt: skip
    add("--list", action=ListPresets, nargs=0, help="list the models by Megatron's flags, with what each is, and end")
    add("--ranks", type=int, nargs="+", metavar="N", help="GPUs of the job; several are compared")
    add("--strategy", nargs="+", choices=list(STRATEGIES), metavar="NAME", help=f"any of {', '.join(STRATEGIES)}")
    add("--mtbf", type=seconds, nargs="+", metavar=METAVAR,
        help="mean time between failures of the job, as 8h (default: of a scenario 2 h to 10 min, as in the paper; "
        "of a model what Llama 3's training had, by GPUs)")  # fmt: skip
    add("--hours", type=float, metavar="H",
        help="hours of wall time (default: of a scenario 12; of a model as long as 100 failures take, at most a month)"
    )  # fmt: skip
    add_job(parser)
    add("--weibull", type=float, metavar="K",
        help="shape of the time between failures: 1 is a Poisson process, less gives bursts (default: 1)")  # fmt: skip
    add("--together", type=float, metavar="P",
        help="probability that a failing node takes the next one along (default: 0)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="recorded failures instead of drawn ones: lines of milliseconds,add|remove,NODE")  # fmt: skip
    add("--speedup", type=float, metavar="X", help="let the trace run X times as fast (default: 1)")
    add("--skew", type=float, metavar="S",
        help="skew of the experts' popularity: 0 is even, 1 is one expert for all tokens (default: 0)")  # fmt: skip
    add("--workers", type=int, default=1, metavar="N", help="processes; more pay from thousands of trainings on")
    add("--best", action="store_true", help="propose strategy, window and interval, with reasons")
    add("--plot", type=Path, metavar="FILE", help="draw ETTR, lost time and goodput (.png, .svg, .pdf)")
    parser.set_defaults(run=simulate, flags=[])


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job and its failures that ``moevement simulate`` and ``advise`` share."""
    add = parser.add_argument
    add("--iteration-time", type=seconds, metavar=METAVAR, help="how long an iteration takes, as 2.5s, if it is known")
    add_machines(parser, has_defaults=False)
    add("--storage-bandwidth", type=float, metavar="GB/S", help="to durable storage, all nodes together")
    add("--seeds", type=int, metavar="N", help="trainings of each kind (default: 20)")
    add("--first-seed", type=int, metavar="N", help="the others follow (default: 0)")
    add("--spares", type=int, metavar="N", help="spare nodes at the start (default: always one more)")
    add("--repair", type=seconds, metavar=METAVAR,
        help="time after which a failed node is a spare again (default: never)")  # fmt: skip
    add("--detect", type=seconds, metavar=METAVAR, help="time until a failure is noticed (default: 1s, assumed)")
    add("--regroup", type=seconds, metavar=METAVAR,
        help="time until process groups are there again (default: 10s, assumed)")  # fmt: skip
    add(
        "--interference",
        type=float,
        metavar="F",
        help="share of the seconds of copies to the host by which they lengthen training (default: 0, assumed)",
    )
    add(
        "--contention",
        type=float,
        metavar="F",
        help="share of the seconds in which links could carry nothing but copies to peers, by which those lengthen "
        "training (default: the profile's, or 0, assumed)",
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
            own = run(costs, job.run.strategies, draws, job.until_s, job.spares(), arguments.workers)
            variants = Variants(costs)
            for drawn in draws if arguments.best else ():
                report(f"{job.job.name}: the best of each strategy for a failure every {drawn.mtbf_s:.0f} s")
                rows = [cell for cell in own if cell.mtbf_s == drawn.mtbf_s]
                advice.append((job, advise(variants, drawn, job.until_s, job.spares(), rows, fixed_by(arguments))))
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
    """Return the choices that the command line makes for the advice: kind of window, and W."""
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
