"""Command ``moevement bench replay``, which times replayed iterations as more operators are frozen."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.bench_run import samples_of
from moevement_core.errors import ConfigError
from moevement_core.util.numbers import AT_LEAST_ONE

ROUTINGS = {
    "even": ["--moe-router-force-load-balancing"],
    # All tokens of a layer get the same random bias. With a negative value, the router generates it once.
    "skewed": ["--moe-router-force-biased", "-1.5"],
}
Told = dict[str, Any]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement bench replay``."""
    parser.description = (
        "Replay iterations of an MoE of 57 M parameters with a growing share of frozen operators, under even and under "
        "skewed routing. Each round has an iteration for each share. A ratio compares two iterations of one round; "
        "the output has the median and quartiles of all rounds."
    )
    parser.add_argument(
        "--nproc", type=int, default=2, metavar="N", help="number of expert-parallel ranks (default: 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=4, metavar="S", help="steps from 0 to 1 of the frozen share (default: 4)"
    )
    parser.add_argument("--rounds", type=int, default=12, metavar="R", help="number of rounds (default: 12)")
    parser.add_argument(
        "--micro-batches", type=int, default=2, metavar="M", help="micro-batches in an iteration (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=replay)


def replay(arguments: argparse.Namespace) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    if arguments.nproc < 1 or arguments.rounds < 1 or not arguments.steps >= 1:
        raise ConfigError(
            f"--nproc {arguments.nproc} --rounds {arguments.rounds} --steps {arguments.steps}; each needs 1 or more"
        )
    AT_LEAST_ONE.check("--micro-batches", arguments.micro_batches)
    shares = [step / arguments.steps for step in range(arguments.steps + 1)]
    routings = {routing: _summarise(_run(arguments, routing, shares), shares) for routing in ROUTINGS}
    _print(routings, shares, Console())
    if arguments.json:
        print(json.dumps({"nproc": arguments.nproc, "shares": shares, "routings": routings}))
    return 0


def _run(arguments: argparse.Namespace, routing: str, shares: list[float]) -> Told:
    from megatron.moevement.bench import replay as script

    flags = ["--use-distributed-optimizer", *ROUTINGS[routing]]
    flags += ["--global-batch-size", str(arguments.micro_batches * arguments.nproc)]
    flags += ["--train-iters", str(script.AT + 1), "--expert-model-parallel-size", str(arguments.nproc)]
    # The loss may become NaN after so many steps on random routing, and the benchmark does not use it.
    flags += ["--no-check-for-nan-in-loss-and-grad"]
    flags += ["--moevement-sparse-ckpt", "--moevement-window", "4", "--moevement-replicas", "0"]
    print(f"{arguments.nproc} ranks, {routing} routing ...", flush=True)
    environment = {script.SHARES_ENV: json.dumps(shares), script.ROUNDS_ENV: str(arguments.rounds)}
    return dict(samples_of(script, arguments.nproc, flags, environment))


def _summarise(measured: Told, shares: list[float]) -> Told:
    """Return the quartiles of the iteration time for each share of frozen operators.

    Times are relative to the iteration of the same round in which no operator is frozen.
    """
    rounds: dict[int, dict[float, float]] = defaultdict(dict)
    for sample in measured["samples"]:
        rounds[sample["round"]][sample["share"]] = sample["seconds"]
    ratios = {share: [seconds[share] / seconds[shares[0]] for seconds in rounds.values()] for share in shares}
    return {
        "skewness": measured["skewness"],
        "normal_s": statistics.median(seconds[shares[0]] for seconds in rounds.values()),
        "ratios": [_quartiles(ratios[share]) for share in shares],
        "rounds": len(rounds),
    }


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def _print(routings: dict[str, Told], shares: list[float], console: Console) -> None:
    columns = [f"{routing} (S = {summary['skewness']:.3f})" for routing, summary in routings.items()]
    table = Table("operators frozen", *columns)
    for index, share in enumerate(shares):
        row = [summary["ratios"][index] for summary in routings.values()]
        table.add_row(f"{share:.0%}", *(f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in row))
    table.add_row("normal iteration", *(f"{summary['normal_s']:.3f} s" for summary in routings.values()))
    console.print(table)
