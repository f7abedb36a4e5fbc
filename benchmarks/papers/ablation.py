"""Live ablation after MoEvement's figure 13: recoveries without one technique, under the same kills.

    python -m benchmarks.papers.ablation        (writes ablation.md; measure on an idle machine)
    python -m benchmarks.papers.ablation --rehearse --kills 1        (a tiny model; prints the page, writes nothing)

Each job trains an MoE on four pipeline stages of one rank. The same rank is killed in the same iterations, and a spare
takes over. One job has all techniques. Each of the others lacks one: skipping weight gradients of frozen operators,
boundary logs, or reordering by popularity.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.bench_run import SCRIPT, record_of

OUTPUT = Path(__file__).with_suffix(".md")
RANKS, KILLED_RANK, WINDOW, MICRO_BATCHES, KILLS = 4, 2, 4, 8, 3
EVERY_GRADIENT = Path(__file__).with_name("every_gradient.py")
"""Script that computes the weight gradients of frozen operators in replays."""
FLAGS = (
    "--pipeline-model-parallel-size", str(RANKS), "--num-layers", str(RANKS), "--global-batch-size", str(MICRO_BATCHES),
    "--moevement-sparse-ckpt", "--moevement-window", str(WINDOW), "--moevement-recovery", "replay",
    "--moevement-replicas", "1", "--moevement-replicas-on-same-node", "--hidden-size", "256", "--ffn-hidden-size", "512",
    "--moe-ffn-hidden-size", "512", "--seq-length", "64", "--max-position-embeddings", "64",
)  # fmt: skip


TINY = (
    "--hidden-size", "64", "--ffn-hidden-size", "64", "--moe-ffn-hidden-size", "64", "--seq-length", "32",
    "--max-position-embeddings", "32",
)  # fmt: skip
"""Sizes with which a rehearsal takes few minutes."""


@dataclass(frozen=True)
class Way:
    """Job that lacks one technique."""

    name: str
    flags: tuple[str, ...] = ()
    skips_gradients: bool = True
    """True if replays skip the weight gradients of frozen operators."""
    stages: int = 1
    """Stages that roll back after the loss of one rank."""


WAYS = (
    Way("everything"),
    Way("weight gradients of frozen operators, too", skips_gradients=False),
    # So little memory holds no log, and all stages roll back.
    Way("no boundary logs", ("--moevement-log-memory-gb", "1e-9"), stages=RANKS),
    # No share ever changes by so much, so the order stays that of the operator table.
    Way("no reordering", ("--moevement-reorder-threshold", "1e9")),
)


@dataclass(frozen=True)
class Result:
    """Medians over the recoveries of one job."""

    lost_s: float
    """Seconds from the kill to the next committed iteration, without that iteration."""
    replay_s: float
    iteration_s: float
    replayed: float
    kills: int


class AblationError(Exception):
    """Error of a job whose recoveries are not those that the ablation is about."""


def main() -> None:
    """Run all jobs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS, metavar="K", help=f"kills in each job (default: {KILLS})")
    parser.add_argument(
        "--rehearse", action="store_true", help="run a tiny model, whose seconds mean nothing, and write no page"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE")
    arguments = parser.parse_args()
    results = {}
    for way in WAYS:
        print(f"{way.name}: {arguments.kills} kills ...", flush=True)
        results[way.name] = killed(way, arguments.kills, TINY if arguments.rehearse else ())
        print(results[way.name], flush=True)
    if arguments.rehearse:
        print(report(results))
    else:
        arguments.output.write_text(report(results), encoding="utf-8")


def words(way: Way, kills: int) -> list[str]:
    """Return the flags of the training: a kill in the backward pass of every second window."""
    every = 2 * WINDOW + 1
    flags = [*FLAGS, *way.flags, "--train-iters", str((kills + 1) * every)]
    for kill in range(1, kills + 1):
        flags += ["--moevement-inject", f"rank={KILLED_RANK},iteration={kill * every},phase=backward"]
    return flags


def killed(way: Way, kills: int, sizes: Sequence[str]) -> Result:
    """Run a job with kills, and return its medians.

    Args:
        way: technique that the job lacks.
        kills: number of kills.
        sizes: flags of the model's sizes, in place of those of :mod:`moevement_cli.bench_run`.

    Raises:
        AblationError: the job had another number of failures, or other stages rolled back.
    """
    script = (SCRIPT,) if way.skips_gradients else (EVERY_GRADIENT, SCRIPT)
    events, metrics = record_of(RANKS, 1, [*words(way, kills), *sizes], script=script)
    return result_of(way, kills, events, metrics)


def result_of(way: Way, kills: int, events: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> Result:
    """Return the medians of a job's recoveries, from its events and metrics; see :func:`killed`."""
    failures = [event for event in events if event["event"] == "failure"]
    rolled_back = [len(failure["recovery"]["ranks"]) for failure in failures]
    if rolled_back != [way.stages] * kills:
        raise AblationError(
            f"{way.name}: ranks that rolled back after each failure: {rolled_back}; needs {way.stages}, {kills} times"
        )
    committed_at = {line["iteration"]: line["time"] for line in metrics}
    iteration_s = statistics.median(line["iteration_s"] or 0.0 for line in metrics)
    lost = [committed_at[failure["recovery"]["until"] + 1] - failure["failed_at"] for failure in failures]
    return Result(
        lost_s=statistics.median(lost) - iteration_s,
        replay_s=statistics.median(failure["recovery"]["replay_s"] for failure in failures),
        iteration_s=iteration_s,
        replayed=statistics.median(failure["recovery"]["replayed"] for failure in failures),
        kills=len(failures),
    )


def report(results: dict[str, Result]) -> str:
    """Return the text of the page."""
    full = results[WAYS[0].name]
    rows = [
        [name, f"{result.lost_s:.2f}", f"{result.replay_s:.2f}", f"{result.replay_s / full.replay_s:.2f}",
         f"{result.replayed:g}", f"{result.iteration_s:.2f}", f"{result.kills}"]
        for name, result in results.items()
    ]  # fmt: skip
    columns = ("job", "a kill costs, s", "of that replay, s", "replay, over everything", "iterations replayed",
               "an iteration, s", "kills")  # fmt: skip
    return f"""# Recoveries without one technique, live

    python -m benchmarks.papers.ablation        (writes this file)

MoEvement's figure 13 adds one technique after the other. Here each job lacks one of them. An MoE of {RANKS} layers trains on {RANKS} stages of
one rank, with windows of {WINDOW} and {MICRO_BATCHES} micro-batches an iteration. Rank {KILLED_RANK} is killed in the backward pass of the same iterations in
each job, and a spare takes over. Numbers are medians. Without logs all stages roll back; otherwise the stage of the killed rank.

{table(columns, rows)}

What a kill costs is the time until the next iteration is committed, without that iteration. It includes detection and new process
groups, which no technique changes. The routing of so short a training is nearly even, so reordering can gain little here.

{measured_on("torch", "megatron-core")}, gloo. The ranks share the cores of one machine.
"""


if __name__ == "__main__":
    main()
