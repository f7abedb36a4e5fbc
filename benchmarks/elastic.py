"""Benchmark of Lazarus's allocation, placement and migration on recorded routing. It writes benchmarks/elastic.md.

    python -m benchmarks.elastic ROUTING.npz TRACE.csv

The first file holds ``tokens_per_expert``, int [records, layers, experts], and ``iteration``, int [records]: the tokens
routed to each expert at these iterations. A record stands for all iterations until the next one. The second file lists
changes of nodes: milliseconds, ``add`` or ``remove``, node.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_core.elastic.allocation import allocate, better_allocation, slowest_share
from moevement_core.elastic.migration import assign_places, migrate
from moevement_core.elastic.placement import (
    Placement,
    compact,
    experts_lost,
    maximum_rank_overlap,
    place,
    spread,
    survival,
)
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
    """Result of a policy over the whole record."""

    share: float
    """Tokens of the slowest replica, divided by those of a replica under even load. Mean over records and layers."""
    times: int
    """Number of rebalances."""
    moved: float
    """Number of experts that nodes fetched for a layer, mean over layers."""


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
        for row in survival_rows(model, step, loads_at(tokens, iterations, step, experts)[::2])
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
    """Return rows of figure 8: the probability that the job keeps a replica of every expert, by placement.

    Args:
        model: name of the model, for the rows.
        step: step of the loads, for the rows.
        loads: tokens of each expert, ``[layers, E]``.
    """
    replicas = [allocate(layer, NODES * SLOTS, FLOOR) for layer in loads]
    slots, losses = [SLOTS] * NODES, range(1, NODES - 3)
    equal = place(allocate(np.ones(loads.shape[1], dtype=np.int64), NODES * SLOTS, FLOOR), slots, FLOOR)
    overlap = [maximum_rank_overlap(counts, slots) for counts in replicas]
    alone = [migrate(dict(enumerate(equal)), placement).experts for placement in overlap]
    placements: dict[str, Sequence[Placement]] = {
        "maximum rank overlap": overlap,
        "maximum rank overlap, each layer on its own": [
            tuple(experts[node] for node in range(NODES)) for experts in alone
        ],
        "spread": [spread(counts, slots) for counts in replicas],
        "compact": [compact(counts, slots) for counts in replicas],
    }
    rows = [
        [name, *(f"{float(_counted(of_layers, lost)):.2f}" for lost in losses)]
        for name, of_layers in placements.items()
    ]
    one_layer = [statistics.mean(float(survival(counts, NODES, SLOTS, lost)) for counts in replicas) for lost in losses]
    rows.append(["maximum rank overlap, one layer (mean)", *(f"{value:.2f}" for value in one_layer)])
    return [[f"{model}, step {step}", *row] for row in rows]


def _counted(layers: Sequence[Placement], lost: int) -> Fraction:
    """Return the share of all sets of ``lost`` nodes whose loss leaves each expert of each layer a replica."""
    sets = list(combinations(range(NODES), lost))
    return Fraction(sum(not any(experts_lost(layer, nodes) for layer in layers) for nodes in sets), len(sets))


def rebalance_row(model: str, tokens: Tokens, iterations: npt.NDArray[np.int64], experts: int) -> list[list[str]]:
    """Return rows for constant replicas, and for allocations that follow the load."""
    chosen = np.argsort(-tokens.sum(0), axis=-1)[:, :experts]  # a layer keeps its experts over the whole record
    loads = np.take_along_axis(tokens, chosen[None], axis=-1)
    every = int(iterations[1] - iterations[0])
    policies: dict[str, float | None] = {
        "equal replicas, never": None,
        "Lazarus, every 200 iterations": 0.0,
        "every 200, if the slowest replica of a layer gains 10%": 0.1,
        "every 200, if it gains 30%": 0.3,
    }
    rows = []
    for name, gain in policies.items():
        result = _follow(loads, 200 // every, gain)
        rows.append([model, name, f"{result.share:.2f}", str(result.times), f"{result.moved:.0f}"])
    return rows


def _follow(loads: Tokens, interval: int, gain: float | None) -> Rebalanced:
    """Follow the loads, record by record, as a live job does: if one layer gains enough, all layers are placed anew.

    Args:
        loads: tokens of each expert, ``[records, layers, E]``.
        interval: records between two checks.
        gain: share of the slowest replica's tokens that a layer must gain. None: the placement never changes.
    """
    slots = [SLOTS] * NODES
    layers = loads.shape[1]
    equal = allocate(np.ones(loads.shape[2], dtype=np.int64), NODES * SLOTS, FLOOR)
    replicas = [equal] * layers
    held = [dict(enumerate(place(equal, slots, FLOOR)))] * layers
    shares, times, moved = [], 0, 0
    for number, tokens in enumerate(loads):
        shares.append(statistics.mean(slowest_share(*pair) for pair in zip(tokens, replicas, strict=True)))
        if gain is None or (number + 1) % interval:
            continue
        recent = loads[number + 1 - interval : number + 1].sum(0)
        if any(better_allocation(*pair, FLOOR, gain) is not None for pair in zip(recent, replicas, strict=True)):
            replicas = [allocate(layer, NODES * SLOTS, FLOOR) for layer in recent]
            wanted = [place(counts, slots, FLOOR) for counts in replicas]
            places = assign_places(held, wanted)
            migrations = [migrate(*pair, places) for pair in zip(held, wanted, strict=True)]
            held = [dict(migration.experts) for migration in migrations]
            times, moved = times + 1, moved + sum(len(migration.transfers) for migration in migrations)
    return Rebalanced(statistics.mean(shares), times, moved / layers)


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
        "rebalances",
        "experts moved, of a layer",
    )
    return f"""# Elastic experts on recorded routing

    python -m benchmarks.elastic ROUTING.npz TRACE.csv        (writes this file)

{NODES} nodes of {SLOTS} slots and at least {FLOOR} replicas, as in Lazarus's section 6. The record comes from a GPT-MoE with 32 experts in
24 layers. A model with fewer experts has the most loaded experts of each layer, as in the paper. All results are computed;
nothing was trained.

The first table has the probability that every expert of every layer keeps a replica if this number of nodes is lost at once
(the paper's figure 8). All sets of nodes are counted, for 12 layers together: every other layer of the record, because the
paper's models have 12. *each layer on its own* shows what a rebalance would cost if each layer chose which node gets which
place, and so moved the fewest experts: groups of different layers then lie on different nodes. Jobs have one mapping for all
layers. *one layer (mean)* is the probability for one layer, by the closed form.

{table(first, survived)}

The paper has 0.41 for GPT-L at step 200 with 4 nodes lost, and 0.12 for the spread placement. Here spread has the same 0.12, and
maximum rank overlap comes to 0.41 with 5 nodes lost. The paper does not say how it cuts the record.

The second table shows how well allocations follow the routing, and what that costs. A job allocates anew for the tokens since
the last check, in all layers, if one of its 24 layers gains enough. With so many layers one nearly always does. *slowest over an
even replica* is the number of tokens of the slowest replica, divided by that of a replica under even load. The expert part of an
iteration takes that many times as long; 1.00 is perfect.

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
