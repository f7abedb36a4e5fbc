"""``moevement bench replay``: a replayed iteration's time over a normal one's, as more operators are frozen."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_core.cli.bench import MODEL, SCRIPT, SWITCHES
from moevement_core.errors import ConfigError

ROUTINGS = {
    "even": ["--moe-router-force-load-balancing"],
    # The same random bias for every token of a layer; negative: drawn once.
    "skewed": ["--moe-router-force-biased", "-1.5"],
}
Told = dict[str, Any]


def replay(arguments: argparse.Namespace) -> int:
    """Run, print the table; returns the exit code."""
    if arguments.nproc < 1 or arguments.rounds < 1 or not arguments.steps >= 1:
        raise ConfigError(
            f"--nproc {arguments.nproc} --rounds {arguments.rounds} --steps {arguments.steps}; each needs 1 or more"
        )
    shares = [step / arguments.steps for step in range(arguments.steps + 1)]
    routings = {routing: _summarise(_run(arguments, routing, shares), shares) for routing in ROUTINGS}
    _print(routings, shares, Console())
    if arguments.json:
        print(json.dumps({"nproc": arguments.nproc, "shares": shares, "routings": routings}))
    return 0


def _run(arguments: argparse.Namespace, routing: str, shares: list[float]) -> Told:
    from megatron.moevement import launch
    from megatron.moevement.bench import replay as script

    flags = [word for pair in MODEL.items() for word in map(str, pair)]
    flags += [*SWITCHES, *ROUTINGS[routing], "--global-batch-size", str(arguments.micro_batches * arguments.nproc)]
    flags += ["--train-iters", str(script.AT + 1), "--expert-model-parallel-size", str(arguments.nproc)]
    # Not checked for NaN: after so many steps on random routing nobody cares for the loss.
    flags += ["--no-check-for-nan-in-loss-and-grad"]
    flags += ["--moevement-sparse-ckpt", "--moevement-window", "4", "--moevement-replicas", "0"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            script.OUTPUT_ENV: folder,
            script.SHARES_ENV: json.dumps(shares),
            script.ROUNDS_ENV: str(arguments.rounds),
        }
        print(f"{arguments.nproc} ranks, {routing} routing ...", flush=True)
        argv = [str(Path(script.__file__)), str(SCRIPT), *flags, "--run-dir", str(Path(folder) / "run")]
        code = launch.launch_on_this_host(launch.Launch(arguments.nproc, argv, False, False))
        if code:
            raise ConfigError(f"the measured run ended with {code}; its output stands above")
        return dict(json.loads((Path(folder) / "samples.json").read_text(encoding="utf-8")))


def _summarise(told: Told, shares: list[float]) -> Told:
    """Quartiles of each share's time over that of the same round with nothing frozen."""
    rounds: dict[int, dict[float, float]] = defaultdict(dict)
    for sample in told["samples"]:
        rounds[sample["round"]][sample["share"]] = sample["seconds"]
    ratios = {share: [one[share] / one[shares[0]] for one in rounds.values()] for share in shares}
    return {
        "skewness": told["skewness"],
        "normal_s": statistics.median(one[shares[0]] for one in rounds.values()),
        "ratios": [_quartiles(ratios[share]) for share in shares],
        "rounds": len(rounds),
    }


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def _print(routings: dict[str, Told], shares: list[float], console: Console) -> None:
    columns = [f"{routing} (S = {told['skewness']:.3f})" for routing, told in routings.items()]
    table = Table("operators frozen", *columns)
    for index, share in enumerate(shares):
        row = [told["ratios"][index] for told in routings.values()]
        table.add_row(f"{share:.0%}", *(f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in row))
    table.add_row("normal iteration", *(f"{told['normal_s']:.3f} s" for told in routings.values()))
    console.print(table)
