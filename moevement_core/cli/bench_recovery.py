"""``moevement bench recovery``: one stage replays alone, against all stages, on the same loss."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_core.cli.bench import MODEL, SCRIPT
from moevement_core.errors import ConfigError

Samples = list[dict[str, Any]]


def recovery(arguments: argparse.Namespace) -> int:
    """Run, print the table; returns the exit code."""
    if arguments.stages < 2 or arguments.micro_batches < 1 or arguments.rounds < 1 or arguments.window < 1:
        raise ConfigError(
            f"--stages {arguments.stages} --micro-batches {arguments.micro_batches} --rounds {arguments.rounds} "
            f"--window {arguments.window}; needs 2 or more stages and 1 or more of the others"
        )
    samples = _run(arguments)
    told = {kind: _summarise([one for one in samples if one["kind"] == kind]) for kind in ("normal", "stage", "all")}
    _print(told, Console())
    if arguments.json:
        shape = {name: getattr(arguments, name) for name in ("stages", "micro_batches", "window", "rounds")}
        print(json.dumps({**shape, "measured": told}))
    return 0


def _run(arguments: argparse.Namespace) -> Samples:
    from megatron.moevement import launch
    from megatron.moevement.bench import recovery as script

    every = arguments.window + 2
    flags = [word for pair in MODEL.items() for word in map(str, pair)]
    flags += ["--swiglu", "--disable-bias-linear", "--bf16", "--pipeline-model-parallel-size", str(arguments.stages)]
    flags += ["--num-layers", str(arguments.stages), "--global-batch-size", str(arguments.micro_batches)]
    # Iterations at which memory is lost are multiples of `every`; one round is a stage and all stages.
    first = -(-script.BEGIN // every) * every
    flags += ["--train-iters", str(first + (2 * arguments.rounds - 1) * every + 1)]
    flags += ["--moevement-sparse-ckpt", "--moevement-window", str(arguments.window), "--moevement-replicas", "0"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            script.OUTPUT_ENV: folder,
            script.STAGE_ENV: str(arguments.stages // 2),
            script.EVERY_ENV: str(every),
        }
        argv = [str(Path(script.__file__)), str(SCRIPT), *flags, "--run-dir", str(Path(folder) / "run")]
        code = launch.launch_on_this_host(launch.Launch(arguments.stages, argv, False, False))
        if code:
            raise ConfigError(f"the measured run ended with {code}; its output stands above")
        return list(json.loads((Path(folder) / "samples.json").read_text(encoding="utf-8")))


def _summarise(samples: Samples) -> dict[str, float]:
    """Medians, of a replay for each replayed iteration."""

    def median(name: str) -> float:
        return statistics.median(one[name] / (one["replayed"] or 1) for one in samples)

    return {
        "wall_s": median("wall_s"),
        "cpu_s": median("cpu_s"),
        "replayed": statistics.median(one["replayed"] for one in samples),
        "fetch_s": statistics.median(one["fetch_s"] for one in samples),
        "fed_mb": statistics.median(one["fed_bytes"] for one in samples) / 1e6,
        "count": len(samples),
    }


def _print(told: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("", "normal iteration", "one stage alone", "all stages")
    normal = told["normal"]

    def row(label: str, text: Any) -> None:
        table.add_row(label, *(text(told[kind]) for kind in ("normal", "stage", "all")))

    row("seconds an iteration", lambda one: f"{one['wall_s']:.3f}")
    row("over a normal one", lambda one: f"{one['wall_s'] / normal['wall_s']:.2f}")
    row("processor seconds of all ranks, an iteration", lambda one: f"{one['cpu_s']:.3f}")
    row("over a normal one", lambda one: f"{one['cpu_s'] / normal['cpu_s']:.2f}")
    row("iterations replayed", lambda one: f"{one['replayed']:.0f}")
    row("plan and fetch", lambda one: f"{1e3 * one['fetch_s']:.0f} ms")
    row("fed from logs", lambda one: f"{one['fed_mb']:.1f} MB")
    row("measured", lambda one: f"{one['count']:.0f}")
    console.print(table)
