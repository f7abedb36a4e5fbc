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
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import elastic_failures, elastic_transfers
from benchmarks.environment import measured_on
from benchmarks.lazarus_testbed import (
    EXPERT_BYTES,
    FLOOR,
    ITERATION_S,
    MODELS,
    NODES,
    RECORD_EVERY,
    SAMPLES_OF_NODE,
    SLOTS,
    Tokens,
    job_of,
    loads_at,
    loads_of,
    routed,
)
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
from moevement_core.simulator.elastic import ElasticTraining, System, TrainedElastically, most_loaded

SHOWN = ("GPT-S", "GPT-L")
"""Models of the tables except those of single failures."""
SEGMENT_S = 4800.0
OVERLAP = "maximum rank overlap"
"""Placement of the paper (theorem 1)."""
RATIOS, EXPERTS, TOKENS = (1, 2, 4), 8, 262_144
"""Load ratios, experts and tokens of the layer in the paper's figure 10b; 1:1 is added."""
STEPS = (201, 4001)
"""Steps near those of the paper's figure 8. The record has every tenth step."""


class Rebalanced(NamedTuple):
    """Result of a policy over the whole record."""

    share: float
    """Tokens of the slowest replica, divided by those of a replica under even load. Mean over records and layers."""
    times: int
    """Number of rebalances."""
    moved: float
    """Number of experts that nodes fetched for a layer, mean over layers."""


class Tables(NamedTuple):
    """Rows of each table of the page."""

    survived: list[list[str]]
    ratios: list[list[str]]
    followed: list[list[str]]
    spot: list[list[str]]
    transfers: list[list[str]]
    failures: list[list[str]]
    rates: list[list[str]]


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
        row for model in SHOWN for step in STEPS
        for row in survival_rows(model, step, loads_at(tokens, iterations, step, MODELS[model])[::2])
    ]  # fmt: skip
    followed = [row for model in SHOWN for row in rebalance_rows(model, tokens, iterations)]
    spot = [row for model in SHOWN for row in spot_rows(model, tokens, changes(arguments.trace))]
    transfers = elastic_transfers.transfer_rows(tokens, iterations)
    tables = Tables(survived, ratio_rows(), followed, spot, transfers, *elastic_failures.failure_rows(tokens))
    page = report(tables, arguments.trace.stem)
    arguments.output.write_text(page, encoding="utf-8")


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
        OVERLAP: overlap,
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


def ratio_rows() -> list[list[str]]:
    """Return rows of figure 10b: the probability that one layer keeps every expert, by load ratio and placement."""
    slots, losses = [SLOTS] * NODES, range(1, NODES - 3)
    rows = []
    for ratio in RATIOS:
        replicas = allocate(routed(TOKENS, EXPERTS, ratio), NODES * SLOTS, FLOOR)
        overlap = (survival(replicas, NODES, SLOTS, lost) for lost in losses)
        apart = (_counted([spread(replicas, slots)], lost) for lost in losses)
        rows.append([f"{ratio}:1", OVERLAP, *(f"{float(value):.2f}" for value in overlap)])
        rows.append([f"{ratio}:1", "spread", *(f"{float(value):.2f}" for value in apart)])
    return rows


def _counted(layers: Sequence[Placement], lost: int) -> Fraction:
    """Return the share of all sets of ``lost`` nodes whose loss leaves each expert of each layer a replica."""
    sets = list(combinations(range(NODES), lost))
    return Fraction(sum(not any(experts_lost(layer, nodes) for layer in layers) for nodes in sets), len(sets))


def rebalance_rows(model: str, tokens: Tokens, iterations: npt.NDArray[np.int64]) -> list[list[str]]:
    """Return rows for constant replicas, and for allocations that follow the load."""
    loads = most_loaded(tokens, MODELS[model])
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


def spot_rows(model: str, tokens: Tokens, trace: list[Change]) -> list[list[str]]:
    """Return rows for three systems on the segments of a trace: samples and lost time, as means over segments."""
    loads = loads_of(model, tokens)
    length = trace[-1].at_s
    begins = [begin for begin in np.arange(1800.0, length - SEGMENT_S, SEGMENT_S)]
    rows: list[list[str]] = []
    results: dict[System, list[TrainedElastically]] = {}
    nodes = []
    for system in System:
        for begin_s in begins:
            first, rest = segment(trace, begin_s, begin_s + SEGMENT_S, NODES)
            training = ElasticTraining(job_of(model, system), system, loads, every=RECORD_EVERY, first=first)
            results.setdefault(system, []).append(training.run(rest, SEGMENT_S))
            stretches = nodes_over_time(first, rest, SEGMENT_S)
            nodes.append(sum((end - start) * count for start, end, count in stretches) / SEGMENT_S)
    base = statistics.mean(result.batches for result in results[System.RESTART])
    for system, trained in results.items():
        batches = statistics.mean(result.batches for result in trained)
        rows.append(
            [model, str(system), f"{batches * NODES * SAMPLES_OF_NODE:,.0f}", f"{batches / base:.1f}x",
             *(f"{statistics.mean(getattr(result, name) for result in trained):.1f}"
               for name in ("changes", "fallbacks", "moved")),
             *(f"{statistics.mean(result.lost_s[name] for result in trained):.0f}"
               for name in ("regroup", "migrate", "restart", "checkpoint")),
             f"{statistics.mean(nodes):.1f}"]
        )  # fmt: skip
    return rows


def report(tables: Tables, trace: str) -> str:
    """Return the text of the page.

    Args:
        tables: rows of all tables.
        trace: name of the trace.
    """
    third = (
        "model", "system", "samples", "over restart", "changes", "from a checkpoint", "experts moved", "regrouping, s",
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

{table(first, tables.survived)}

The paper has 0.41 for GPT-L at step 200 with 4 nodes lost, and 0.12 for the spread placement. Here spread has the same 0.12, and
maximum rank overlap comes to 0.41 with 5 nodes lost. The paper does not say how it cuts the record.

The same for one layer of {EXPERTS} experts, one of which gets R times as many tokens as with even loads (figure 10b). The paper draws 2:1
and 4:1, prints no numbers, and calls its placement much more effective than *spread* at both. Here it is so at 4:1 only. At 1:1 and
2:1, the second group has two experts and gets the three or four nodes that the first one leaves, fewer than these experts have replicas.
The theorem does not hold then ([placement.py](../moevement_core/elastic/placement.py)). The paper does not give this layer's slots.

{table(("load ratio", *first[1:]), tables.ratios)}

The next table shows how well allocations follow the routing, and what that costs. A job allocates anew for the tokens since
the last check, in all layers, if one of its 24 layers gains enough. With so many layers one nearly always does. *slowest over an
even replica* is the number of tokens of the slowest replica, divided by that of a replica under even load. The expert part of an
iteration takes that many times as long; 1.00 is perfect.

{table(second, tables.followed)}

The other tables compare three systems. *lazarus* has elastic experts. *regroup* has equal replicas in groups of nodes; a group
holds every expert once (the paper's DS(FT)). *restart* is the same, and starts from the newest checkpoint whenever a node leaves
(the paper's DS). Every node has its own batch of {SAMPLES_OF_NODE} sequences, so fewer nodes train fewer samples in an iteration. The models'
experts keep their order in the record: *regroup* and *restart* put neighbours on one node.

Sources of the constants:

- published: nodes, slots, intervals of checkpoints and rebalances, {EXPERT_BYTES["GPT-S"] / 1e6:.0f} and {EXPERT_BYTES["GPT-L"] / 1e6:.0f} MB an expert, 100 Gb/s
- inside a published range: 25 s to regroup (20 to 40 s)
- fitted: iterations of {", ".join(f"{ITERATION_S[model]:g} s ({model})" for model in MODELS)} with equal loads. With them *lazarus* comes to within
  1% of the paper's 2,926 and 1,996 steps in 30 minutes of figure 6, and of its 45 samples a second of GPT-M on ten nodes.
- derived: a checkpoint takes as long as 14 bytes a parameter take at the file server's 10 Gb/s. The bytes of an expert imply 14.
- assumed: a restart takes 120 s; with the iterations that it repeats, this is near the 3 to 5 minutes that the paper gives for
  DS(FT) on GPT-L. Experts take half of an iteration, which waits for the node with the most tokens.

**Single failures**: a random node fails every 5 minutes (figure 6) or 40 minutes (figure 7), until five of ten are left. The baselines
save four times as rarely in figure 7. *lazarus* saves no checkpoints, because the paper gives it some in figure 9 only. Means over {elastic_failures.ORDERS} orders of nodes.

{table(elastic_failures.HEADER, tables.failures)}

Samples per second between two failures, by the number of live nodes:

{table(elastic_failures.NODES_HEADER, tables.rates)}

Some results agree with the paper. The lead over *regroup* in figure 6 is 1.4 and 2.3 times, and 1.4 and 2.8 in the paper. In figure 7,
*regroup* is a little behind *restart*, because it leaves live nodes unused. On GPT-L, *lazarus* is no slower after the last failure
than before: experts need no second replica then.

The lead over *restart* is smaller here: 1.8 instead of 2.8 and 2.9 instead of 5.7 times as many samples in figure 6. The column with
restarts of {elastic_failures.LONG_RESTART_S:.0f} s shows how much figure 6 depends on this assumption; even so, GPT-L stays below the paper's 5.7. The paper has 34
samples a second of GPT-M for DS on ten nodes without checkpoints. Here *restart* has 40 with checkpoints: only the loads of experts
slow it down, and nothing that DeepSpeed itself may cost.

**Several failures at once** (table 2): all sets of lost nodes that leave every expert a replica. Experts are counted over 12 layers.
A live job's tables give all layers the same mapping of nodes, for the loads of the step before and after the loss. The last column
has the processor time of a plan, as the median over sets; the paper's plans take less than 100 ms.

{table(elastic_transfers.HEADER, tables.transfers)}

The paper has one sample for each case, which lies inside the range here for two of the four. It moves fewer experts in the other two. It
does not say when its job had last placed the experts. Its transfers take at least eight times as long as the busiest sender needs
here at the full rate of its link. The seconds of the whole reconfiguration, 18 to 34 in the paper, are not computed here.

**Nodes that come and go**: the trace `{trace}` in segments of {SEGMENT_S / 60:.0f} minutes on a cluster of {NODES} nodes; means over segments. The trace has
more nodes than the cluster. So a node that leaves is replaced at once as long as others wait. All systems save checkpoints.

{table(third, tables.spot)}

The paper publishes numbers for one segment of 80 minutes, and does not say which one. Lazarus trains 2.3 times as many samples as DS
on GPT-S and 3.4 times as many on GPT-L, and 1.2 and 1.8 times as many as DS(FT). Two results stand out here. First, replicas with
equal shares of an expert's tokens do not give nodes equal work: experts with few replicas have few tokens, and maximum rank
overlap puts them on the same nodes. Second, *regroup* wastes most because nodes are used in groups: with 16 experts a group is
four nodes of ten.

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
