"""Benchmark of nodes lost one after the other under Slurm: seconds to the next iteration, and equal bits at the end.

    python -m benchmarks.cluster --losses 50 --seed 1 --layout PP2xEP2 --spare-nodes 3     # half of the soak
    python -m benchmarks.cluster --losses 50 --seed 2 --layout PP4 --spare-nodes 3         # the other half

The job has four ranks on two nodes, two spares on each other node, one task per node, and the batch script as shipped.
Again and again the benchmark takes away the node with ranks 2 and 3. It alternates between two kinds of loss. A killed
node resets its connections; a node without power is silent. The benchmark then boots the node before Slurm misses it,
and the node rejoins with spares. The benchmark needs root, and Debian's slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from tests.cluster.cluster import Cluster, why_not
from tests.cluster.training import PP4, Training, assert_undisturbed, train
from tests.failure_free import FOLDER_ENV
from tests.training import SCRIPT

LAYOUTS: dict[str, dict[str, Any]] = {
    "PP2xEP2": {},
    "PP4": PP4,
}
PARTS = ("detect", "abort", "regroup", "set up and fetch", "enter the loop", "replay")


def main() -> int:
    """Lose nodes and print a table. The exit code is 1 if the bits differ from a failure-free run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=6, help="number of losses (default: 6)")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds of a lease (default: 10)")
    parser.add_argument("--layout", choices=list(LAYOUTS), default="PP2xEP2")
    parser.add_argument(
        "--spare-nodes", type=int, default=1, help="spare nodes; the more, the sooner the next loss (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random times of losses (default: 1)")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"no cluster can start here: {reason}", file=sys.stderr)
        return 2
    os.environ.setdefault("MOEVEMENT_CACHE", str(Path(tempfile.gettempdir()) / "moevement-cache"))
    os.environ.setdefault("MOEVEMENT_PLATFORM", "cpu")
    folder = Path(tempfile.mkdtemp(prefix="moevement-losses-"))  # kept if the benchmark fails
    with Cluster(nodes=2 + arguments.spare_nodes) as cluster:
        code = _run(cluster, folder, arguments)
    shutil.rmtree(folder)
    return code


def _run(cluster: Cluster, folder: Path, arguments: argparse.Namespace) -> int:
    draw = random.Random(arguments.seed)
    flags = {"train_iters": 1_000_000, "moevement_lease_seconds": arguments.lease, **LAYOUTS[arguments.layout]}
    training = train(
        cluster, folder / "job", nodes=2 + arguments.spare_nodes, spares=2 * arguments.spare_nodes,
        environment={"SCRIPT": str(SCRIPT)}, **flags,
    )  # fmt: skip
    training.wait_for_iteration(8)
    losses: list[tuple[str, float, dict[str, float]]] = []
    for number in range(arguments.losses):
        how = ("killed", "power lost")[number % 2]
        training.wait_for_spares(2)
        node = training.node_of(2)
        training.wait_for_iteration(training.iteration() + draw.randint(1, 8))
        at = cluster.kill_node(node) if how == "killed" else cluster.lose_power(node)
        seconds = training.resumes_after(at)
        losses.append((how, seconds, training.events("failure")[-1]["parts"]))
        print(f"loss {number + 1} of {arguments.losses}: {node} {how}, {seconds:.1f} s", file=sys.stderr, flush=True)
        cluster.restart_node(node)
    at_iteration = training.end()
    os.environ[FOLDER_ENV] = str(folder)
    assert_undisturbed(training, **flags)
    _print(losses, arguments, training, at_iteration)
    return 0


def _print(
    losses: list[tuple[str, float, dict[str, float]]], arguments: argparse.Namespace, training: Training, end: int
) -> None:
    print("# Nodes that are lost under Slurm\n")
    print(
        f"`{' '.join(['python -m benchmarks.cluster', *sys.argv[1:]])}`; {measured_on('torch', 'megatron-core', 'nvidia-resiliency-ext')}\n"
    )
    print(
        f"Layout {arguments.layout}, lease {arguments.lease:g} s, seed {arguments.seed}. {len(losses)} nodes were lost in a "
        f"row, {len(training.events('failure'))} recoveries; at iteration {end} all losses, gradient norms and the final "
        f"state are those of a failure-free run, bit for bit. {2 + arguments.spare_nodes} nodes and Slurm share the cores of one machine.\n"
    )
    print("Medians of seconds; `next iteration` is from the loss to the next iteration that training commits.\n")
    print("| | losses | next iteration | longest | " + " | ".join(PARTS) + " |")
    print("|---|---|---|---|" + "---|" * len(PARTS))
    for how in ("killed", "power lost"):
        losses_of_kind = [(seconds, parts) for kind, seconds, parts in losses if kind == how]
        if not losses_of_kind:
            continue
        seconds = [loss_s for loss_s, _ in losses_of_kind]
        parts = [f"{statistics.median(parts[name] for _, parts in losses_of_kind):.2f}" for name in PARTS]
        row = [how, str(len(losses_of_kind)), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}", *parts]
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    sys.exit(main())
