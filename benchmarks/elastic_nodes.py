"""Live benchmark of several systems while nodes leave and join as in a recorded trace. It writes elastic_nodes.md.

    python -m benchmarks.elastic_nodes TRACE.csv                 (half an hour)

The benchmark plays a segment of the trace faster than recorded, on six network namespaces that act as nodes with one
rank each. The first node runs the coordinator and stays. The benchmark kills a node that the trace removes, and boots
it again as the replacement that the trace adds. The job has fewer nodes until the processes of the booted node have
joined, as with a preempted instance. The benchmark needs root, slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_core.simulator.availability import Change, changes, segment
from tests.cluster.cluster import Cluster, why_not
from tests.cluster.training import Training, train
from tests.training import SCRIPT

OUTPUT = Path(__file__).with_suffix(".md")
PLOT = OUTPUT.with_suffix(".png")
NODES = 6
SAVE_EVERY = 50
"""Iterations between two dense checkpoints of a job that restarts from them."""
MODEL: dict[str, Any] = {
    "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1, "use_distributed_optimizer": False,
    "bf16": False, "num_layers": 2, "num_experts": 8, "micro_batch_size": 2, "global_batch_size": 120,
    "train_iters": 100_000, "lr": 1e-3, "log_interval": 1, "moevement_lease_seconds": 5, "moevement_window": 4,
}  # fmt: skip
ELASTIC = {"moevement_elastic": True, "moevement_join_wait": 2}
PLAIN = {"moevement_sparse_ckpt": False, "moevement_window": False, "moevement_replicas": False}
FLAGS: dict[str, dict[str, Any]] = {
    "lazarus": ELASTIC | {"moevement_expert_slots": 4, "moevement_rebalance_interval": 100},
    "replicas": ELASTIC,
    "shards": ELASTIC | {"use_distributed_optimizer": True, "moevement_recovery": "redo"},
    "restart": PLAIN | {"moevement_lease_seconds": False, "save_interval": SAVE_EVERY},
}
WHAT = {
    "static": "elastic experts, no node is lost",
    "lazarus": "elastic experts, 4 slots of 8 experts on each rank (`--moevement-elastic --moevement-expert-slots 4`)",
    "replicas": "every rank has all state (`--moevement-elastic`)",
    "shards": "a distributed optimizer, gradients at peers (`... --use-distributed-optimizer --moevement-recovery redo`)",
    "restart": f"no fault tolerance; at each change, a restart from the newest dense checkpoint (every {SAVE_EVERY} iterations), "
    "as soon as the lost nodes are booted again",
}


@dataclass
class Played:
    """Result of one system on the segment of the trace."""

    iterations: int = 0
    """Iterations committed at the end of the segment. Iterations that a restart repeats count once."""
    again: int = 0
    """Iterations that restarts lost and repeated, for ``restart`` only."""
    down_s: list[float] = field(default_factory=list)
    """Seconds from each loss or join to resumed training, from the ``resized`` events. Empty for ``restart``."""
    sizes: list[int] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    progress: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of seconds since the beginning of the segment, and the newest iteration at that time."""
    is_unequal: bool = False
    """True if digests of operators differed before and after a migration."""


def main() -> int:
    """Play the trace under each system, write the page and the plot, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE.csv", help="lines: milliseconds, add or remove, node")
    parser.add_argument("--begin", type=float, default=28800.0, metavar="S", help="begin of segment (default: 28800)")
    parser.add_argument("--length", type=float, default=4800.0, metavar="S", help="length of segment (default: 4800)")
    parser.add_argument("--speedup", type=float, default=40.0, metavar="X", help="speed of the replay (default: 40)")
    parser.add_argument("--systems", nargs="+", choices=WHAT, default=list(WHAT), help="systems (default: all)")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"no cluster can start here: {reason}", file=sys.stderr)
        return 2
    os.environ.setdefault("MOEVEMENT_CACHE", str(Path(tempfile.gettempdir()) / "moevement-cache"))
    os.environ.setdefault("MOEVEMENT_PLATFORM", "cpu")
    first, recorded = segment(changes(arguments.trace), arguments.begin, arguments.begin + arguments.length, NODES - 1)
    events = list(node_events(first, recorded, arguments.speedup))
    length_s = arguments.length / arguments.speedup
    played: dict[str, Played] = {}
    with tempfile.TemporaryDirectory() as folder:
        for system in arguments.systems:
            print(f"{system}: {length_s:.0f} s, {len(events)} changes", file=sys.stderr, flush=True)
            with Cluster(nodes=NODES) as cluster:
                play = _restarting if system == "restart" else _elastic
                losses = () if system == "static" else events
                played[system] = play(
                    cluster, Path(folder, system), FLAGS.get(system, FLAGS["lazarus"]), losses, length_s
                )
            print(f"{system}: {played[system].iterations} iterations", file=sys.stderr, flush=True)
    OUTPUT.write_text(report(played, events, arguments), encoding="utf-8")
    draw(played, events, PLOT)
    return 0


def node_events(first: Sequence[str], recorded: Sequence[Change], speedup: float) -> Iterator[tuple[float, list[str]]]:
    """Yield the time of each loss in seconds, and the nodes of the cluster that are lost then.

    A node of the cluster stands for a node of the trace, and later for the replacement that the trace adds for it.
    """
    here = dict(zip(first, [f"n{number}" for number in range(2, NODES + 1)], strict=True))
    for change in recorded:
        lost = [here.pop(node) for node in sorted(change.removed)]
        here.update(zip(sorted(change.added), lost, strict=True))
        yield change.at_s / speedup, lost


def _elastic(
    cluster: Cluster, folder: Path, flags: dict[str, Any], events: Sequence[tuple[float, list[str]]], length_s: float
) -> Played:
    training = train(
        cluster,
        folder,
        nodes=NODES,
        processes_per_node=1,
        spares=0,
        environment={"SCRIPT": str(SCRIPT)},
        **MODEL | flags,
    )
    training.wait_for_iteration(12)
    played, began_at = Played(), time.time()
    start = training.iteration()
    for at_s, nodes in events:
        _watch(training, played, began_at, began_at + at_s)
        for node in nodes:
            cluster.kill_node(node)
        for node in nodes:
            cluster.restart_node(node)
    _watch(training, played, began_at, began_at + length_s)
    lines = [line for line in training.record.metrics() if line["time"] <= began_at + length_s]
    played.iterations = lines[-1]["iteration"] - start
    played.losses = {line["iteration"]: line["loss"] for line in lines}
    resized = training.events("resized")
    played.sizes = [event["world_size"] for event in resized]
    played.down_s = [event["seconds"]["total"] for event in resized]
    played.is_unequal = any(not event["digests_equal"] for event in resized)
    cluster.restore()
    return played


def _watch(training: Training, played: Played, began_at: float, until: float) -> None:
    while time.time() < until:
        played.progress.append((time.time() - began_at, training.iteration()))
        time.sleep(min(0.5, max(0.0, until - time.time())))


def _restarting(
    cluster: Cluster, folder: Path, flags: dict[str, Any], events: Sequence[tuple[float, list[str]]], length_s: float
) -> Played:
    """Play the segment for ``restart``: cancel the job at each change, and start it again on the booted nodes."""
    saved = folder / "saved"
    played = Played()
    run = 0

    def start(nodes: int) -> Training:
        nonlocal run
        run += 1
        again = {"load": str(saved)} if (saved / "latest_checkpointed_iteration.txt").exists() else {}
        return train(
            cluster, folder / f"run{run}", nodes=nodes, processes_per_node=1, spares="none",
            environment={"SCRIPT": str(SCRIPT)},
            **MODEL | flags | {"save": str(saved)} | again,
        )  # fmt: skip

    training = start(NODES)
    training.wait_for_iteration(12)
    began_at = time.time()
    first = training.iteration()
    newest = first
    for at_s, nodes in events:
        _watch(training, played, began_at, began_at + at_s)
        newest = max(newest, training.iteration())
        for node in nodes:
            cluster.kill_node(node)
        training.job.cancel()
        for node in nodes:
            cluster.restart_node(node)
        training = start(NODES)
        played.sizes.append(NODES)
        back = _saved(saved)
        played.again += newest - back
    _watch(training, played, began_at, began_at + length_s)
    lines = [line for line in training.record.metrics() if line["time"] <= began_at + length_s]
    played.iterations = (lines[-1]["iteration"] if lines else _saved(saved)) - first
    played.losses = {line["iteration"]: line["loss"] for line in lines}
    training.job.cancel()
    cluster.restore()
    return played


def _saved(folder: Path) -> int:
    tracker = folder / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def report(played: dict[str, Played], events: Sequence[tuple[float, list[str]]], arguments: argparse.Namespace) -> str:
    """Return the text of the page."""
    static = played.get("static")
    rows = []
    for system, result in played.items():
        rate = f"{result.iterations / static.iterations:.2f}" if static is not None else ""
        shared = set(result.losses) & set(static.losses) if static is not None else set()
        apart = (
            max((abs(result.losses[iteration] / static.losses[iteration] - 1) for iteration in shared), default=None)
            if static
            else None
        )
        rows.append(
            [
                system, f"{result.iterations}", rate, " ".join(map(str, result.sizes)) or "6", f"{result.again}",
                f"{statistics.median(result.down_s):.1f}" if result.down_s else "",
                f"{max(result.down_s):.1f}" if result.down_s else "",
                f"{apart:.1e}" if system != "static" and apart is not None else "",
            ]
        )  # fmt: skip
    header = [
        "system", "iterations", "share of static", "sizes after each change", "repeated", "s to resume, median", "most",
        "loss difference to static",
    ]  # fmt: skip
    when = ", ".join(f"{at_s:.0f} s ({len(nodes)})" for at_s, nodes in events)
    what = "\n".join(f"- **{system}**: {WHAT[system]}" for system in played)
    length_s = arguments.length / arguments.speedup
    unequal = [system for system, result in played.items() if result.is_unequal]
    equal = "in all systems" if not unequal else f"in all systems but {', '.join(unequal)}"
    return f"""# Nodes that come and go, live

    python -m benchmarks.elastic_nodes TRACE.csv        (writes this file and the plot)

The benchmark plays the trace `{arguments.trace.stem}` from {arguments.begin:.0f} s on, {arguments.length:.0f} s of it in {length_s:.0f} s, on six network
namespaces under Slurm that act as nodes with one rank each. Nodes are lost at {when}. A lost node is booted again at once,
and joins when its processes have started. There are no spares.

{what}

{table(header, rows)}

A snapshot has one copy on this page (`--moevement-replicas 1`); the default is two. If two nodes are lost at once or within
seconds, a shard may be lost together with its copy. *shards* then restarts from the beginning. The trace is played faster than
recorded, but restarts do not become faster. To start six interpreters on two cores takes longer than the time between
two changes. So the numbers of *restart* say nothing about other machines.

Two cores compute for all ranks, however many there are, so fewer ranks are not slower here. The systems differ only in what
a change costs. After each change, digests of all operators were compared with those before it; they are equal {equal}.
[elastic.md](elastic.md) says what fewer nodes cost at the paper's scale.

![iterations over time]({PLOT.name})

{measured_on("torch", "megatron-core")}
"""


def draw(played: dict[str, Played], events: Sequence[tuple[float, list[str]]], path: Path) -> None:
    """Draw committed iterations over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for system, result in played.items():
        if result.progress:
            first = result.progress[0][1]
            axes.plot(
                [at for at, _ in result.progress], [newest - first for _, newest in result.progress], label=system
            )
    for at_s, _ in events:
        axes.axvline(at_s, color="0.8", linewidth=1, zorder=0)
    axes.set_xlabel("seconds; nodes are lost at the grey lines")
    axes.set_ylabel("iterations committed")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
