"""Benchmark of Lazarus's allocation, placement and migration on recorded routing. It writes benchmarks/elastic.md.

    python -m benchmarks.elastic ROUTING.npz TRACE.csv

The first file holds ``tokens_per_expert``, int [records, layers, experts], and ``iteration``, int [records]: the tokens
routed to each expert at these iterations. A record stands for all iterations until the next one. The second file lists
changes of nodes: milliseconds, ``add`` or ``remove``, node.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_core.elastic.allocation import Replicas, allocate, slowest_share
from moevement_core.elastic.migration import migrate
from moevement_core.elastic.placement import Placement, compact, experts_lost, place, spread, survival
from moevement_core.elastic.rebalance import Hysteresis, LoadMonitor
from moevement_core.simulator.availability import Change, changes, nodes_over_time, segment
from moevement_core.simulator.elastic import ElasticJob, ElasticTraining, System, Trained

NODES, SLOTS, FLOOR = 10, 6, 2
"""Number of nodes, slots per node, and minimum replicas of an expert in the paper's testbed (section 6.1)."""
MODELS = {"GPT-S": 8, "GPT-L": 16}
SEGMENT_S = 4800.0
_SMALL = ElasticJob(experts=8, slots=6, floor=2, iteration_s=0.45, nodes=10, expert_bytes=63e6, checkpoint_s=5.0)
_LARGE = ElasticJob(experts=16, slots=6, floor=2, iteration_s=0.65, nodes=10, expert_bytes=112e6, checkpoint_s=16.0)
JOBS = {
    model: {System.LAZARUS: job, System.REGROUP: job, System.RESTART: replace(job, checkpoint_every=50)}
    for model, job in (("GPT-S", _SMALL), ("GPT-L", _LARGE))
}
STEPS = (201, 4001)
"""Steps near those of the paper's figure 8. The record has every tenth step."""
Tokens = npt.NDArray[np.int64]


class Rebalanced(NamedTuple):
    """Result of a policy over the whole record, as means over layers."""

    share: float
    """Tokens of the slowest replica, divided by those of a replica under even load. Mean over records and layers."""
    times: float
    """Number of new allocations of a layer."""
    moved: float
    """Number of experts that nodes fetched for a layer."""


def main() -> None:
    """Compute all tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("routing", type=Path, metavar="ROUTING.npz")
    parser.add_argument("trace", type=Path, metavar="TRACE.csv")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    record = np.load(arguments.routing)
    tokens, iterations = record["tokens_per_expert"].astype(np.int64), record["iteration"]
    survived = [
        row for model, experts in MODELS.items() for step in STEPS
        for row in survival_rows(model, step, loads_at(tokens, iterations, step, experts))
    ]  # fmt: skip
    followed = [rebalance_row(model, tokens, iterations, experts) for model, experts in MODELS.items()]
    spot = [row for model in MODELS for row in spot_rows(model, tokens, iterations, changes(arguments.trace))]
    page = report(survived, [row for rows in followed for row in rows], spot, arguments.trace.stem)
    arguments.output.write_text(page, encoding="utf-8")


def loads_at(tokens: Tokens, iterations: npt.NDArray[np.int64], step: int, experts: int) -> Tokens:
    """Return the loads of the most loaded experts of every layer at a step, [layers, E].

    The paper cuts the record to the size of its models in the same way.
    """
    at = int(np.searchsorted(iterations, step))
    return -np.sort(-tokens[at], axis=-1)[:, :experts]


def survival_rows(model: str, step: int, loads: Tokens) -> list[list[str]]:
    """Return rows of figure 8: the probability that every expert keeps a replica, by placement and lost nodes.

    Probabilities are means over layers.
    """
    rows = []
    replicas = [allocate(layer, NODES * SLOTS, FLOOR) for layer in loads]
    ways: dict[str, Callable[[Replicas, int, int], Placement]] = {"spread": spread, "compact": compact}
    closed = [
        statistics.mean(float(survival(layer_replicas, NODES, SLOTS, lost)) for layer_replicas in replicas)
        for lost in range(1, NODES - 3)
    ]
    rows.append([f"{model}, step {step}", "maximum rank overlap", *(f"{value:.2f}" for value in closed)])
    for name, way in ways.items():
        placements = [way(allocation, NODES, SLOTS) for allocation in replicas]
        probabilities = [
            statistics.mean(float(_counted(placement, lost)) for placement in placements)
            for lost in range(1, NODES - 3)
        ]
        rows.append([f"{model}, step {step}", name, *(f"{value:.2f}" for value in probabilities)])
    return rows


def _counted(placement: Placement, lost: int) -> Fraction:
    sets = list(combinations(range(len(placement)), lost))
    return Fraction(sum(not experts_lost(placement, nodes) for nodes in sets), len(sets))


def rebalance_row(model: str, tokens: Tokens, iterations: npt.NDArray[np.int64], experts: int) -> list[list[str]]:
    """Return rows for constant replicas, and for allocations that follow the load."""
    chosen = np.argsort(-tokens.sum(0), axis=-1)[:, :experts]  # a layer keeps its experts over the whole record
    loads = np.take_along_axis(tokens, chosen[None], axis=-1)
    every = int(iterations[1] - iterations[0])
    equal = allocate(np.ones(experts, dtype=np.int64), NODES * SLOTS, FLOOR)
    policies: dict[str, Hysteresis | None] = {
        "equal replicas, never": None,
        "Lazarus, every 200 iterations": Hysteresis(200 // every, gain=0.0, memory=0.5),
        "every 200, if the slowest replica gains 10%": Hysteresis(200 // every, gain=0.1, memory=0.5),
        "every 200, if it gains 30%": Hysteresis(200 // every, gain=0.3, memory=0.5),
    }
    rows = []
    for name, hysteresis in policies.items():
        layers = [_follow(loads[:, layer], equal, hysteresis) for layer in range(loads.shape[1])]
        means = [statistics.mean(values) for values in zip(*layers, strict=True)]
        rows.append([model, name, f"{means[0]:.2f}", f"{means[1]:.1f}", f"{means[2]:.0f}"])
    return rows


def _follow(loads: Tokens, replicas: Replicas, hysteresis: Hysteresis | None) -> Rebalanced:
    """Follow one layer, record by record. The policy decides on a new allocation after each record."""
    monitor = LoadMonitor(loads.shape[1], hysteresis or Hysteresis())
    held = dict(enumerate(place(replicas, NODES, SLOTS, FLOOR)))
    shares, times, moved = [], 0, 0
    for tokens in loads:
        shares.append(slowest_share(tokens, replicas))
        monitor.count(tokens)
        better = monitor.proposed(replicas, FLOOR) if hysteresis is not None else None
        if better is not None:
            migration = migrate(held, place(better, NODES, SLOTS, FLOOR))
            replicas, held = better, dict(migration.experts)
            times, moved = times + 1, moved + len(migration.transfers)
    return Rebalanced(statistics.mean(shares), times, moved)


def spot_rows(model: str, tokens: Tokens, iterations: npt.NDArray[np.int64], trace: list[Change]) -> list[list[str]]:
    """Return rows for three systems on the segments of a trace: iterations and lost time, as means over segments."""
    experts = MODELS[model]
    chosen = np.argsort(-tokens.sum(0), axis=-1)[:, :experts]
    loads = np.take_along_axis(tokens, chosen[None], axis=-1)[:, ::2]  # every other layer, because the models have 12
    every = int(iterations[1] - iterations[0])
    length = trace[-1].at_s
    begins = [begin for begin in np.arange(1800.0, length - SEGMENT_S, SEGMENT_S)]
    rows: list[list[str]] = []
    results: dict[System, list[Trained]] = {}
    nodes = []
    for system in System:
        for begin_s in begins:
            first, rest = segment(trace, begin_s, begin_s + SEGMENT_S, NODES)
            training = ElasticTraining(job=JOBS[model][system], system=system, loads=loads, every=every, first=first)
            results.setdefault(system, []).append(training.run(rest, SEGMENT_S))
            stretches = nodes_over_time(first, rest, SEGMENT_S)
            nodes.append(sum((end - start) * count for start, end, count in stretches) / SEGMENT_S)
    base = statistics.mean(result.iterations for result in results[System.RESTART])
    for system, trained in results.items():
        trained_iterations = statistics.mean(result.iterations for result in trained)
        rows.append(
            [model, str(system), f"{trained_iterations:,.0f}", f"{trained_iterations / base:.1f}x",
             *(f"{statistics.mean(getattr(result, name) for result in trained):.1f}"
               for name in ("changes", "fallbacks", "moved")),
             *(f"{statistics.mean(result.lost_s[name] for result in trained):.0f}"
               for name in ("regroup", "migrate", "restart", "checkpoint")),
             f"{statistics.mean(nodes):.1f}"]
        )  # fmt: skip
    return rows


def report(survived: list[list[str]], followed: list[list[str]], spot: list[list[str]], trace: str) -> str:
    """Return the text of the page."""
    third = (
        "model", "system", "iterations", "over restart", "changes", "from a checkpoint", "experts moved", "regrouping, s",
        "migrating, s", "restarting, s", "checkpoints, s", "nodes, mean",
    )  # fmt: skip
    first = ("model", "placement", *(f"{lost} lost" for lost in range(1, NODES - 3)))
    second = (
        "model",
        "replicas",
        "slowest over an even replica",
        "allocations of a layer",
        "experts moved, of a layer",
    )
    return f"""# Elastic experts on recorded routing

    python -m benchmarks.elastic ROUTING.npz TRACE.csv        (writes this file)

{NODES} nodes of {SLOTS} slots and at least {FLOOR} replicas, as in Lazarus's section 6. The record comes from a GPT-MoE with 32 experts in
24 layers. A model with fewer experts has the most loaded experts of each layer, as in the paper. All results are computed;
nothing was trained.

The first table has the probability that every expert of a layer keeps a replica if this number of nodes is lost at once, as a
mean over layers (the paper's figure 8). For maximum rank overlap it is computed by the closed form, which a test compares with
a count over all sets of nodes. For the other placements all sets are counted.

{table(first, survived)}

The paper has 0.41 for GPT-L at step 200 with 4 nodes lost, and 0.12 for the spread placement. It does not say for which layers.

The second table shows how well allocations follow the routing, and what that costs. *slowest over an even replica* is the
number of tokens of the slowest replica, divided by that of a replica under even load. The expert part of an iteration takes that
many times as long; 1.00 is perfect.

{table(second, followed)}

**Nodes that come and go**: the trace `{trace}` in segments of {SEGMENT_S / 60:.0f} minutes on a cluster of {NODES} nodes; means over segments. *lazarus* has
elastic experts. *regroup* has equal replicas in groups of nodes; a group holds every expert once (the paper's DS(FT)). *restart*
starts from the newest checkpoint whenever a node leaves (the paper's DS). These constants are published or implied by the paper:
iterations of {JOBS["GPT-S"][System.LAZARUS].iteration_s} and {JOBS["GPT-L"][System.LAZARUS].iteration_s} s on ten nodes, 63 and 112 MB an expert, 100 Gb/s, and 25 s to regroup. Two are assumed:
a restart takes 120 s, and experts take half of an iteration, which waits for the node with the most tokens. The trace has more
nodes than the cluster. So a node that leaves is replaced at once as long as others wait.

{table(third, spot)}

The paper publishes numbers for one segment of 80 minutes, and does not say which one. Lazarus trains 2.3 times as many samples as DS
on GPT-S and 3.4 times as many on GPT-L, and 1.2 and 1.8 times as many as DS(FT). Two results stand out here. First, replicas with
equal shares of an expert's tokens do not give nodes equal work: experts with few replicas have few tokens, and maximum rank
overlap puts them on the same nodes. Second, *regroup* wastes most because nodes are used in groups: with 16 experts a group is
four nodes of ten.

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
