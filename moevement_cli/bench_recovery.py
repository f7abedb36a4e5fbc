"""Command ``moevement bench recovery``, which compares replay by one stage alone with replay by all stages."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.bench_run import record_of, samples_of
from moevement_core.errors import ConfigError

Samples = list[dict[str, Any]]
KINDS = ("normal", "stage", "all")
_NO_LOGS = ("--moevement-log-memory-gb", "1e-9")  # too little memory for the logs that a stage needs to replay alone
WAYS = {
    "redo": ("--moevement-recovery", "redo", "--moevement-replicas", "1"),
    "stage": ("--moevement-replicas", "1"),
    "all": (*_NO_LOGS, "--moevement-replicas", "2"),
    "peers": (*_NO_LOGS, "--moevement-replicas", "2", "--moevement-keep-own", "never"),
}
"""Flags of a job, by the name of its kind of recovery.

- ``redo``: the failed rank alone repeats updates from logged gradients.
- ``stage``: the stage of the failed rank replays alone.
- ``all``: all stages replay.
- ``peers``: all stages replay. No rank keeps its own snapshots, so all snapshots come from peers.
"""
PHASES = ("forward", "backward", "reduce", "backward", "gather")
"""Phases of an iteration. Each kill comes in the next phase of this tuple, and after the last in the first again."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement bench recovery``."""
    parser.description = (
        "Train an MoE on a pipeline. In one run, the ranks of one stage and the ranks of all stages alternately lose "
        "their memory. The first table compares a replayed iteration with a normal one. Then four jobs run, and in "
        "each a rank is killed several times. The first job recovers by redo. In the second job, the stage of the "
        "killed rank replays alone. In the third job, all stages replay. In the fourth job, all stages replay from the "
        "copies of peers. The second table compares the recoveries."
    )
    parser.add_argument(
        "--stages", type=int, default=4, metavar="N", help="pipeline stages of one rank each (default: 4)"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=8, metavar="M", help="micro-batches in an iteration (default: 8)"
    )
    parser.add_argument(
        "--window", type=int, default=3, metavar="W", help="number of iterations in a window (default: 3)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="R", help="number of memory losses of each kind (default: 5)"
    )
    parser.add_argument("--kills", type=int, default=5, metavar="K", help="number of kills in each job (default: 5)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY",
        help=f"kinds of recovery to measure: {', '.join(WAYS)} (peers: all stages replay from copies of peers; "
        "default: all)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=recovery)


def recovery(arguments: argparse.Namespace) -> int:
    """Run the benchmark, print the tables, and return the exit code."""
    if arguments.stages < 2 or arguments.micro_batches < 1 or arguments.rounds < 1 or arguments.window < 1:
        raise ConfigError(
            f"--stages {arguments.stages} --micro-batches {arguments.micro_batches} --rounds {arguments.rounds} "
            f"--window {arguments.window}; --stages must be 2 or more, and each of the others 1 or more"
        )
    if arguments.kills < 0:
        raise ConfigError(f"--kills {arguments.kills}; needs 0 or more")
    samples = _wiped(arguments)
    summaries = {kind: _summarise([sample for sample in samples if sample["kind"] == kind]) for kind in KINDS}
    _print(summaries, Console())
    killed = {}
    if arguments.kills:
        killed = {name: _killed(arguments, name) for name in arguments.ways}
        _print_parts(killed, Console())
    if arguments.json:
        shape = {name: getattr(arguments, name) for name in ("stages", "micro_batches", "window", "rounds", "kills")}
        print(json.dumps({**shape, "measured": summaries, "killed": killed}))
    return 0


def _flags(arguments: argparse.Namespace, iterations: int) -> list[str]:
    flags = ["--pipeline-model-parallel-size", str(arguments.stages), "--num-layers", str(arguments.stages)]
    flags += ["--global-batch-size", str(arguments.micro_batches), "--train-iters", str(iterations)]
    return [*flags, "--moevement-sparse-ckpt", "--moevement-window", str(arguments.window)]


def _wiped(arguments: argparse.Namespace) -> Samples:
    """Return samples of replays and of normal iterations, from a run whose ranks lose their state but stay alive."""
    from megatron.moevement.bench import recovery as script

    every = arguments.window + 2
    # Ranks lose their memory at multiples of `every`. In a round, first one stage loses it, then all stages do.
    first = -(-script.BEGIN // every) * every
    flags = [*_flags(arguments, first + (2 * arguments.rounds - 1) * every + 1), "--moevement-replicas", "0"]
    environment = {script.STAGE_ENV: str(arguments.stages // 2), script.EVERY_ENV: str(every)}
    return list(samples_of(script, arguments.stages, flags, environment))


def _killed(arguments: argparse.Namespace, way: str) -> dict[str, float]:
    """Kill a rank in the middle of the pipeline several times, and return medians of the recoveries.

    A spare takes over the rank each time.
    """
    every = 2 * arguments.window + 1
    flags = [*_flags(arguments, (arguments.kills + 1) * every), *WAYS[way]]
    flags += ["--moevement-replicas-on-same-node"]
    for kill in range(1, arguments.kills + 1):
        phase = PHASES[(kill - 1) % len(PHASES)]
        flags += ["--moevement-inject", f"rank={arguments.stages // 2},iteration={kill * every},phase={phase}"]
    print(f"{arguments.kills} kills, {way} ...", flush=True)
    events, metrics = record_of(arguments.stages, 1, flags)
    return _parts([event for event in events if event["event"] == "failure"], metrics)


def _parts(failures: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Return medians of the parts of a recovery in seconds, and of the job's memory and traffic."""
    committed_at = {line["iteration"]: line["time"] for line in metrics}

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return float(statistics.median(map(value, failures)))

    def of_metrics(*names: str) -> float:
        return float(statistics.median(sum(line.get(name) or 0 for name in names) for line in metrics)) / 1e6

    recoveries = [failure["recovery"] for failure in failures]
    return {
        **{
            name: float(statistics.median(failure["parts"][name] for failure in failures))
            for name in failures[0]["parts"]
        },
        "total": median(lambda failure: failure["total_s"]),
        "kill to next committed iteration": median(
            lambda failure: committed_at[failure["recovery"]["until"] + 1] - failure["failed_at"]
        ),
        "of that an iteration": float(statistics.median(line["iteration_s"] or 0.0 for line in metrics)),
        "until groups are usable": median(lambda failure: failure["usable_at"] - failure["failed_at"]),
        "iterations repeated": median(lambda failure: failure["recovery"]["replayed"]),
        "kills without a repeated one": sum(recovery["replayed"] == 0 for recovery in recoveries),
        "ranks restored": median(lambda failure: len(failure["recovery"]["ranks"])),
        "sent to peers, MB an iteration of a rank": of_metrics("replicated_bytes"),
        "host memory of a rank, MB": of_metrics("snapshot_memory_bytes", "log_memory_bytes"),
        "kills": len(failures),
    }


def _summarise(samples: Samples) -> dict[str, float]:
    """Return medians over ``samples``: either normal iterations only, or only replays by the same stages.

    Times of a replay are divided by the number of replayed iterations.
    """

    def median(name: str) -> float:
        return statistics.median(sample[name] / (sample["replayed"] or 1) for sample in samples)

    return {
        "wall_s": median("wall_s"),
        "cpu_s": median("cpu_s"),
        "replayed": statistics.median(sample["replayed"] for sample in samples),
        "fetch_s": statistics.median(sample["fetch_s"] for sample in samples),
        "fed_mb": statistics.median(sample["fed_bytes"] for sample in samples) / 1e6,
        "count": len(samples),
    }


def _print(summaries: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("", "normal iteration", "one stage alone", "all stages")
    normal = summaries["normal"]

    def row(label: str, text: Any) -> None:
        table.add_row(label, *(text(summaries[kind]) for kind in KINDS))

    row("seconds an iteration", lambda summary: f"{summary['wall_s']:.3f}")
    row("relative to a normal one", lambda summary: f"{summary['wall_s'] / normal['wall_s']:.2f}")
    row("processor seconds of all ranks, an iteration", lambda summary: f"{summary['cpu_s']:.3f}")
    row("relative to a normal one", lambda summary: f"{summary['cpu_s'] / normal['cpu_s']:.2f}")
    row("iterations replayed", lambda summary: f"{summary['replayed']:.0f}")
    row("plan and fetch", lambda summary: f"{1e3 * summary['fetch_s']:.0f} ms")
    row("fed from logs", lambda summary: f"{summary['fed_mb']:.1f} MB")
    row("measured", lambda summary: f"{summary['count']:.0f}")
    console.print(table)


def _print_parts(killed: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("a rank killed; medians, seconds", *killed)
    for name in next(iter(killed.values())):
        table.add_row(name, *(f"{parts[name]:.2f}" for parts in killed.values()))
    console.print(table)
