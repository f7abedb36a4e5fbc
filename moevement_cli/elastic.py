"""Command ``moevement elastic``, which simulates the cost of nodes that leave and join, for elastic and other jobs."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Column, Table

from moevement_core.errors import ConfigError
from moevement_core.simulator.availability import changes, nodes_over_time, segment
from moevement_core.simulator.elastic import ElasticJob, ElasticTraining, System, TrainedElastically, most_loaded
from moevement_core.util.numbers import POSITIVE, SHARE, Range

SEGMENT_S = 4800.0
MOST_SEGMENTS = 100_000
"""Largest number of segments into which ``--segment`` may divide the trace; to simulate so many takes some minutes."""
MOST_LAYERS = 10_000
_FLAGS: dict[str, tuple[type, Any, str]] = {
    "experts": (int, 8, "number of experts in each layer"),
    "slots": (int, 6, "number of slots for experts on a node, in each layer"),
    "floor": (int, 2, "least number of replicas of each expert"),
    "nodes": (int, 10, "number of nodes of the cluster; more nodes in the trace wait until a node leaves"),
    "iteration-s": (float, 0.45, "seconds of an iteration on all nodes, if experts have equal loads"),
    "expert-share": (float, 0.5, "share of an iteration's time that experts take"),
    "expert-bytes": (float, 63e6, "bytes of state of one expert in one layer"),
    "bytes-per-s": (float, 12.5e9, "bytes per second of a node's network"),
    "regroup-s": (float, 25.0, "seconds until new process groups are ready"),
    "restart-s": (float, 120.0, "seconds until a restarted job trains"),
    "checkpoint-every": (int, 250, "iterations between two checkpoints in storage; Lazarus's paper has 50 for restart"),
    "checkpoint-s": (float, 20.0, "seconds by which a checkpoint delays training"),
    "wait-s": (float, 120.0, "seconds for which the job collects new nodes before it adds them"),
    "rebalance-every": (int, 200, "iterations between two allocations of experts"),
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement elastic``."""
    parser.description = (
        "Simulate a trace of nodes that join and leave, in segments, under three systems. lazarus: elastic experts, "
        "with the allocation, placement and migration of --moevement-expert-slots. regroup: nodes form groups, and "
        "each group holds every expert once. restart: the job restarts from the newest checkpoint whenever nodes leave "
        "or join. Defaults are the testbed and the GPT-S model of the Lazarus paper. See docs/elastic.md and "
        "docs/simulator.md."
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE.csv",
        help="file with an event in each line, as milliseconds,add|remove,NODE; "
        "examples/simulate/nodes.csv is an example with random events",
    )  # fmt: skip
    parser.add_argument(
        "--routing", type=Path, metavar="FILE.npz",
        help="recorded loads: tokens_per_expert [records, layers, experts] and iteration [records] (default: --skew)",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="layers, without --routing (default: 12)")
    parser.add_argument(
        "--skew", type=float, default=1.0, metavar="S",
        help="skew without --routing: the k-th most loaded expert has 1 / k^S of the tokens of the first (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--segment", type=float, default=SEGMENT_S, metavar="S", help=f"seconds of a segment (default: {SEGMENT_S:g})"
    )
    parser.add_argument(
        "--system", nargs="+", choices=list(System), metavar="NAME", help=f"default: all of {', '.join(System)}"
    )
    for name, (kind, default, text) in _FLAGS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default:g})")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate the trace under each system, print the table, and return the exit code.

    Raises:
        ConfigError: a number is out of range, or a file has the wrong format.
    """
    job = _job(arguments)
    loads, every = _loads(arguments, job)
    try:
        trace = changes(arguments.trace)
    except OSError as error:
        raise ConfigError(f"{arguments.trace}: {error.strerror}; give a trace of nodes that join and leave") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{arguments.trace}: not a text file; needs lines of milliseconds,add|remove,NODE") from None
    if not trace:
        raise ConfigError(f"{arguments.trace}: the file is empty; needs lines of milliseconds,add|remove,NODE")
    if (count := trace[-1].at_s / arguments.segment) > MOST_SEGMENTS:
        raise ConfigError(
            f"--segment {arguments.segment:g}: {count:.3g} segments; needs at most {MOST_SEGMENTS:,}; make segments "
            "longer"
        )
    begins = np.arange(0.0, max(trace[-1].at_s, 1.0), arguments.segment).tolist()
    results: dict[System, list[TrainedElastically]] = {}
    nodes: list[float] = []
    for begin_s in begins:
        first, rest = segment(trace, begin_s, begin_s + arguments.segment, job.nodes)
        stretches = nodes_over_time(first, rest, arguments.segment)
        nodes.append(sum((end - start) * count for start, end, count in stretches) / arguments.segment)
        for system in arguments.system or System:
            training = ElasticTraining(job, system=System(system), loads=loads, every=every, first=first)
            results.setdefault(System(system), []).append(training.run(rest, arguments.segment))
    _print(results, nodes, arguments)
    if arguments.json:
        print(json.dumps({"results": [_as_json(system, trained) for system, trained in results.items()]}))
    return 0


def _job(arguments: argparse.Namespace) -> ElasticJob:
    values = {name: getattr(arguments, name) for name in (flag.replace("-", "_") for flag in _FLAGS)}
    positive = [name for name in values if name not in ("expert_share", "expert_bytes", "regroup_s", "restart_s",
                                                       "checkpoint_s", "wait_s")]  # fmt: skip
    for name, value in values.items():
        least = "above 0" if name in positive else "0 or more"
        if not (0 < value < float("inf") if name in positive else 0 <= value < float("inf")):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}; needs a number, {least}")
    POSITIVE.check("--segment", arguments.segment)
    Range(1, MOST_LAYERS).check("--layers", arguments.layers)
    Range(0, 99).check("--skew", arguments.skew)
    SHARE.check("--expert-share", values["expert_share"])
    if values["nodes"] * values["slots"] < values["experts"]:
        raise ConfigError(
            f"--nodes {values['nodes']} with --slots {values['slots']} give fewer slots than --experts "
            f"{values['experts']}; needs a slot for each expert"
        )
    return ElasticJob(**values)


def _loads(arguments: argparse.Namespace, job: ElasticJob) -> tuple[npt.NDArray[np.int64], int]:
    """Return the tokens routed to each expert, ``[records, layers, E]``, and the iterations between two records."""
    if arguments.routing is None:
        share = 1.0 / np.arange(1, job.experts + 1) ** arguments.skew
        layers = [np.roll(share, layer) for layer in range(arguments.layers)]
        return np.rint(np.array([layers]) / share.sum() * 1e6).astype(np.int64), job.rebalance_every
    try:
        with np.load(arguments.routing) as record:
            tokens, iterations = record["tokens_per_expert"].astype(np.int64), record["iteration"]
        every = int(iterations[1] - iterations[0])
        if tokens.ndim != 3 or tokens.shape[2] < job.experts or every < 1 or tokens.min() < 0:
            raise ValueError(
                f"tokens_per_expert has shape {list(tokens.shape)}; records 0 and 1 are {every} iterations apart"
            )
    except OSError as error:
        raise ConfigError(f"--routing {arguments.routing}: {error.strerror or 'the file is no .npz file'}") from None
    except (ValueError, KeyError, IndexError, TypeError, EOFError) as error:
        raise ConfigError(
            f"--routing {arguments.routing}: {error}; needs tokens_per_expert [records, layers, {job.experts} experts "
            "or more] and iteration [records], ascending"
        ) from None
    return most_loaded(tokens, job.experts), every


def _print(
    results: dict[System, list[TrainedElastically]], nodes: Sequence[float], arguments: argparse.Namespace
) -> None:
    table = Table(
        Column("system", no_wrap=True), Column("iterations", no_wrap=True), "changes", "from storage", "experts moved",
        "regroup", "migrate", "restart", "save",
        title=f"{arguments.trace.stem}: means of {len(nodes)} segments of {arguments.segment:g} s, "
        f"{statistics.mean(nodes):.1f} nodes",
        caption="last four columns: seconds of a segment that went to regrouping, moving experts, restarts, saves",
    )  # fmt: skip
    for system, trained in results.items():
        counted = (
            statistics.mean(getattr(training, name) for training in trained)
            for name in ("changes", "fallbacks", "moved")
        )
        lost = (
            statistics.mean(training.lost_s[name] for training in trained)
            for name in ("regroup", "migrate", "restart", "checkpoint")
        )
        iterations = statistics.mean(training.iterations for training in trained)
        table.add_row(
            str(system), f"{iterations:,.0f}", *(f"{mean:.1f}" for mean in counted), *(f"{mean:.0f}" for mean in lost)
        )
    console = Console()
    console.print(table)
    if (sentence := compared(results)) is not None:
        console.print(sentence)


def compared(results: Mapping[System, Sequence[TrainedElastically]]) -> str | None:
    """Return a sentence that compares the system that made the most iterations with each other system.

    Return None if there is only one system.
    """
    iterations = {
        system: statistics.mean(training.iterations for training in trained) for system, trained in results.items()
    }
    first, *others = sorted(iterations, key=lambda system: iterations[system], reverse=True)
    if not others:
        return None
    against = ", ".join(
        f"{iterations[first] / iterations[other] - 1:+.0%} iterations against {other}"
        if iterations[other]
        else f"{other} executed no iterations"
        for other in others
    )
    return f"{first} is ahead: {against}."


def _as_json(system: System, trained: Sequence[TrainedElastically]) -> dict[str, Any]:
    return {"system": str(system), "segments": [asdict(training) for training in trained]}
