"""Experts that nodes fetch after several nodes fail at once, as in Lazarus's table 2. :mod:`benchmarks.elastic` prints it.

The published cases are samples: which nodes failed is not said. So every set of lost nodes that leaves a replica of each
expert is planned here, with the tables of a live job (:mod:`moevement_core.elastic.tables`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.lazarus_testbed import EXPERT_BYTES, FLOOR, MODELS, NODES, SLOTS, Tokens, loads_at
from moevement_core.elastic.migration import migrate
from moevement_core.elastic.tables import StageExperts, Table, tables_of

BYTES_PER_S = 12.5e9
"""Bytes per second of a node's network, 100 Gb/s (section 6.1)."""
PUBLISHED_PLAN_S = 0.1
"""Upper bound of the time for a plan, in seconds (section 6.3)."""
HEADER = (
    "model", "step", "lost nodes", "sets of lost nodes that leave every expert", "experts moved, mean", "fewest to most",
    "published", "if each layer maps nodes alone", "transfers at 100 Gb/s, s", "published, s", "plan below 100 ms",
)  # fmt: skip


class Case(NamedTuple):
    """Case of table 2, with its published numbers."""

    model: str
    step: int
    """Step near the published one that the record has."""
    lost: int
    moved: int
    """Experts that nodes fetch, summed over layers."""
    transfer_s: float


CASES = (
    Case("GPT-S", 201, 2, 11, 2.3), Case("GPT-S", 4001, 3, 52, 3.0), Case("GPT-L", 201, 4, 160, 7.6),
    Case("GPT-L", 4001, 5, 55, 7.8),
)  # fmt: skip


@dataclass(frozen=True)
class Reconfiguration:
    """Plan for the nodes that are left after a loss."""

    moved: int
    """Experts that nodes fetch, summed over layers; all layers give a node the same place."""
    moved_alone: int
    """Experts that nodes would fetch if each layer chose the nodes' places for itself."""
    most_sends: int
    """Experts that the busiest node sends."""
    plan_s: float
    """Processor seconds of the plan."""


def tables(loads: Tokens, nodes: Sequence[str], held: Mapping[int, Sequence[Sequence[int]]]) -> dict[int, Table]:
    """Return the table of each layer for nodes of :data:`SLOTS` slots with one rank each.

    Args:
        loads: tokens of each expert, ``[layers, E]``.
        nodes: names of the nodes.
        held: experts that each node holds, by layer; empty at the beginning.
    """
    by_layer = {layer: tokens.tolist() for layer, tokens in enumerate(loads)}
    return tables_of(StageExperts(nodes, by_layer, held), (), SLOTS, FLOOR)


def reconfigure(loads: Tokens, before: Mapping[int, Table], alive: Sequence[int]) -> Reconfiguration | None:
    """Plan the placement on the nodes ``alive``. Return None if an expert has no replica left.

    Args:
        loads: tokens of each expert, ``[layers, E]``.
        before: table of each layer before the loss, with a row for each node.
        alive: numbers of the nodes that are left.
    """
    held = {layer: [table[node] for node in alive] for layer, table in before.items()}
    if any(len({expert for row in rows for expert in row}) < loads.shape[1] for rows in held.values()):
        return None
    began_s = time.process_time()
    after = tables(loads, [f"n{node}" for node in alive], held)
    own_place = {node: node for node in range(len(alive))}
    sends: Counter[int] = Counter()
    for layer, rows in held.items():
        transfers = migrate(dict(enumerate(rows)), after[layer], own_place).transfers
        sends.update(transfer.source for transfer in transfers)
    plan_s = time.process_time() - began_s
    alone = sum(len(migrate(dict(enumerate(rows)), after[layer]).transfers) for layer, rows in held.items())
    return Reconfiguration(sends.total(), alone, max(sends.values(), default=0), plan_s)


def reconfigurations(loads: Tokens, lost: int) -> Iterator[Reconfiguration]:
    """Yield the plan for each set of ``lost`` nodes of :data:`NODES` that leaves every expert a replica."""
    before = tables(loads, [f"n{node}" for node in range(NODES)], {})
    for alive in combinations(range(NODES), NODES - lost):
        plan = reconfigure(loads, before, alive)
        if plan is not None:
            yield plan


def transfer_rows(tokens: Tokens, iterations: npt.NDArray[np.int64]) -> list[list[str]]:
    """Return the rows of the table.

    Args:
        tokens: recorded loads, ``[records, layers, experts]``; every other layer counts, because the models have 12.
        iterations: iteration of each record.
    """
    rows = []
    for case in CASES:
        loads = loads_at(tokens, iterations, case.step, MODELS[case.model])[::2]
        plans = list(reconfigurations(loads, case.lost))
        moved = [plan.moved for plan in plans]
        transfer_s = statistics.mean(plan.most_sends for plan in plans) * EXPERT_BYTES[case.model] / BYTES_PER_S
        plan_s = statistics.median(plan.plan_s for plan in plans)
        rows.append([
            case.model, str(case.step), str(case.lost), str(len(plans)), f"{statistics.mean(moved):.0f}",
            f"{min(moved)} to {max(moved)}", str(case.moved),
            f"{statistics.mean(plan.moved_alone for plan in plans):.0f}", f"{transfer_s:.1f}", f"{case.transfer_s}",
            "yes" if plan_s < PUBLISHED_PLAN_S else "no",
        ])  # fmt: skip
    return rows
