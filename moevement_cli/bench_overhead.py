"""Command ``moevement bench overhead``, which measures what snapshots cost a run, part by part."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.bench_run import samples_of
from moevement_core.errors import ConfigError
from moevement_core.util.numbers import AT_LEAST_ONE


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement bench overhead``."""
    parser.description = (
        "Train an MoE of 57 M parameters in one run. Blocks of iterations in three modes take turns: no snapshots, "
        "snapshots captured, and snapshots captured and sent to peers. A round is a block of each mode. A ratio "
        "compares two blocks of one round; the output has the median and quartiles of all rounds."
    )
    parser.add_argument("--nproc", type=int, default=3, metavar="N", help="number of ranks (default: 3)")
    parser.add_argument(
        "--replicas", type=int, default=2, metavar="R", help="number of peers of each rank (default: 2)"
    )
    parser.add_argument(
        "--window", type=int, default=6, metavar="W", help="number of iterations in a window (default: 6)"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        nargs="+",
        default=[1, 4],
        metavar="M",
        help="micro-batches in an iteration; one run for each number (default: 1 4)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=8,
        metavar="B",
        help="number of rounds, each with a block of every mode (default: 8)",
    )
    parser.add_argument(
        "--block-iterations", type=int, default=6, metavar="I", help="iterations of a block (default: 6)"
    )
    parser.add_argument(
        "--verify", choices=["nothing", "window", "iteration"], default="window",
        help="when ranks compute a digest of the whole state (default: window)",
    )  # fmt: skip
    parser.add_argument(
        "--recovery", choices=["replay", "redo"], nargs="+", default=["replay", "redo"], metavar="HOW",
        help="kinds of recovery to save for, each in a separate run: replay, redo (default: both)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=overhead)


def overhead(arguments: argparse.Namespace) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    if arguments.nproc < 2 or not 1 <= arguments.replicas < arguments.nproc:
        raise ConfigError(
            f"--nproc {arguments.nproc} with --replicas {arguments.replicas}; needs at least one replica and more "
            "ranks than replicas"
        )
    if arguments.blocks < 2 or arguments.block_iterations < 2:
        raise ConfigError(
            f"--blocks {arguments.blocks} --block-iterations {arguments.block_iterations}; each needs 2 or more: the "
            "first block and the first iteration warm up"
        )
    AT_LEAST_ONE.check("--window", arguments.window)
    for count in arguments.micro_batches:
        AT_LEAST_ONE.check("--micro-batches", count)
    lengths = {
        f"{micro_batches} micro-batches, {recovery}": summarise(_run(arguments, micro_batches, recovery))
        for micro_batches in arguments.micro_batches
        for recovery in arguments.recovery
    }
    _print(lengths, Console())
    if arguments.json:
        print(json.dumps({"nproc": arguments.nproc, "replicas": arguments.replicas, "lengths": lengths}))
    return 0


def _run(arguments: argparse.Namespace, micro_batches: int, recovery: str) -> list[dict[str, Any]]:
    """Train once, and return the samples of rank 0, one for each iteration.

    In every iteration the ranks wait for each other, so the samples of one rank suffice.
    """
    from megatron.moevement.bench import overhead as script

    flags = ["--use-distributed-optimizer", "--global-batch-size", str(micro_batches * arguments.nproc)]
    flags += ["--train-iters", str(arguments.blocks * len(script.MODES) * arguments.block_iterations + 1)]
    flags += ["--moevement-sparse-ckpt", "--moevement-window", str(arguments.window)]
    flags += ["--moevement-replicas", str(arguments.replicas), "--moevement-ranks-per-node", "1"]
    flags += ["--moevement-verify", arguments.verify, "--moevement-recovery", recovery]
    print(f"{arguments.nproc} ranks, {micro_batches} micro-batches an iteration, by {recovery} ...", flush=True)
    environment = {script.BLOCK_ENV: str(arguments.block_iterations)}
    return list(samples_of(script, arguments.nproc, flags, environment))


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the table for one run: medians, and ratios of iteration times.

    A block is a few consecutive iterations in one mode; a round is a block of each mode, the first one without saving.
    A ratio is the iteration time with saving over that without saving in the same round. The function leaves out the
    first round and the first iteration of each block, which warm up.
    """
    blocks: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    previous, number = "", -1
    for sample in samples:
        number += sample["mode"] == "off" and previous != "off"
        previous = sample["mode"]
        if number > 0 and not sample["first_of_block"]:
            blocks[number][sample["mode"]].append(sample)
    whole = [modes for modes in blocks.values() if len(modes) == 3]
    every = {mode: [s for modes in whole for s in modes[mode]] for mode in ("off", "capture", "replicate")}
    taken = every["capture"] + every["replicate"]
    megabytes = _median(taken, lambda s: s["copied_bytes"] / 1e6)
    cost_s = _median(taken, lambda s: s["copy_cpu_s"] + s["digest_cpu_s"] + s["begin_s"])
    # The record of an iteration has the cost of the previous digest.
    with_digest = [sample for sample in taken if sample["whole_cpu_s"]]
    return {
        "iteration_s": _median(every["off"], lambda s: s["seconds"]),
        "capture_ratio": _ratios(whole, "capture"),
        "replicate_ratio": _ratios(whole, "replicate"),
        "stall_s": _median(taken, lambda s: s["stall_s"]),
        "training_thread_s": _median(taken, lambda s: s["begin_s"]),
        "copied_mb": megabytes,
        "replicated_mb": _median(every["replicate"], lambda s: s["replicated_bytes"] / 1e6),
        "copy_cpu_ms_per_mb": _median(taken, lambda s: 1e3 * s["copy_cpu_s"]) / megabytes,
        "digest_cpu_ms_per_mb": _median(taken, lambda s: 1e3 * s["digest_cpu_s"]) / megabytes,
        "whole_cpu_s": _median(with_digest, lambda s: s["whole_cpu_s"]) if with_digest else 0.0,
        "capture_cpu_s": cost_s,
        "below_1_percent_from_s": cost_s / 0.01,
        "rounds": len(whole),
    }


def _median(samples: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(value(sample) for sample in samples)


def _ratios(rounds: list[dict[str, list[dict[str, Any]]]], mode: str) -> list[float]:
    """Return lower quartile, median and upper quartile of the ratios of all rounds, in that order.

    The ratio of a round is its iteration time in ``mode``, divided by its iteration time without saving.
    """
    ratios = [
        _median(modes[mode], lambda s: s["seconds"]) / _median(modes["off"], lambda s: s["seconds"]) for modes in rounds
    ]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def _print(lengths: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("", *(f"{result['iteration_s']:.2f} s an iteration\n{name}" for name, result in lengths.items()))

    def row(label: str, text: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(label, *(text(result) for result in lengths.values()))

    def ratio(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda result: "{1:.3f} ({0:.3f} to {2:.3f})".format(*result[name])

    row("captured, over off", ratio("capture_ratio"))
    row("captured and sent, over off", ratio("replicate_ratio"))
    row("rounds", lambda r: str(r["rounds"]))
    row("stall", lambda r: f"{1e3 * r['stall_s']:.1f} ms")
    row("training thread", lambda r: f"{1e3 * r['training_thread_s']:.1f} ms")
    row("copied", lambda r: f"{r['copied_mb']:.1f} MB")
    row("sent", lambda r: f"{r['replicated_mb']:.1f} MB")
    row("copy, processor time", lambda r: f"{r['copy_cpu_ms_per_mb']:.3f} ms/MB")
    row("digest, processor time", lambda r: f"{r['digest_cpu_ms_per_mb']:.3f} ms/MB")
    row("digest of the whole state, processor time", lambda r: f"{1e3 * r['whole_cpu_s']:.1f} ms")
    row("capture below 1% from", lambda r: f"{r['below_1_percent_from_s']:.2f} s an iteration")
    console.print(table)
