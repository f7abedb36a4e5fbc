"""Tables of expert slots: the expert in each slot of each rank, for all layers of a pipeline stage.

Lazarus plans for the loss of nodes (section 4.1): it places experts on nodes, and then spreads a node's experts over
the node's ranks. The slots of a node are the slots of all ranks of the stage on this node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moevement_core.elastic.allocation import Replicas, allocate
from moevement_core.elastic.migration import assign_places
from moevement_core.elastic.placement import Placement, place, spread

Table = tuple[tuple[int, ...], ...]
"""Expert in each slot of a layer, with one row for each expert-parallel rank."""


@dataclass(frozen=True)
class StageExperts:
    """Experts of one pipeline stage: where its ranks are, how popular its experts are, and what its ranks hold."""

    nodes: Sequence[str]
    """Node of each expert-parallel rank of the stage."""
    loads: Mapping[int, Sequence[int]]
    """Recent tokens of each expert, by layer."""
    held: Mapping[int, Sequence[Sequence[int]]]
    """Experts in the slots of each rank now, by layer; empty for a new rank. A layer of which no rank holds experts
    is missing."""

    @property
    def ranks_by_node(self) -> dict[str, list[int]]:
        """Expert-parallel ranks of the stage by node, sorted by the node's name."""
        return {
            name: [rank for rank, node in enumerate(self.nodes) if node == name] for name in sorted(set(self.nodes))
        }


def tables_of(stage: StageExperts, others: Sequence[StageExperts], slots: int, floor: int) -> dict[int, Table]:
    """Return the table of each layer of a stage.

    Stages with equally many ranks on the same nodes share one mapping of nodes to places
    (:func:`~moevement_core.elastic.migration.assign_places`). The groups of experts of all their layers are then on the
    same nodes, and the job survives more losses of nodes. Every stage computes the same mapping; the order of
    ``others`` does not matter.

    Args:
        stage: stage whose tables are wanted.
        others: all other stages of the job.
        slots: slots of each rank in each layer, c.
        floor: f, least number of replicas of each expert. They are on f different nodes if slots and nodes allow.

    Raises:
        ConfigError: there are fewer slots than experts.
    """
    ranks_by_node = stage.ranks_by_node
    node_slots = [slots * len(ranks) for ranks in ranks_by_node.values()]
    sizes = {name: len(ranks) for name, ranks in ranks_by_node.items()}
    if not stage.loads:
        return {}

    def placed(loads: Mapping[int, Sequence[int]]) -> dict[int, Placement]:
        return {
            layer: place(_replicas(tokens, node_slots, floor), node_slots, floor, list(sizes.values()))
            for layer, tokens in loads.items()
        }

    wanted = placed(stage.loads)
    held, placements = _on_nodes(stage, wanted)
    for other in others:
        if other.loads and {name: len(ranks) for name, ranks in other.ranks_by_node.items()} == sizes:
            more_held, more_placements = _on_nodes(other, placed(other.loads))
            held, placements = held + more_held, placements + more_placements
    places = assign_places(held, placements)
    tables: dict[int, Table] = {}
    for layer, placement in wanted.items():
        rows: dict[int, tuple[int, ...]] = {}
        each = np.asarray(stage.loads[layer]) / _replicas(stage.loads[layer], node_slots, floor)
        before = stage.held.get(layer) or [()] * len(stage.nodes)
        for node, ranks in enumerate(ranks_by_node.values()):
            of_ranks = _inside(placement[places[node]], len(ranks), slots, each.tolist())
            of_rank = assign_places([dict(enumerate(before[rank] for rank in ranks))], [of_ranks])
            for number, rank in enumerate(ranks):
                rows[rank] = in_place(before[rank], of_ranks[of_rank[number]])
        tables[layer] = tuple(rows[rank] for rank in range(len(stage.nodes)))
    return tables


def in_place(held: Sequence[int], experts: Sequence[int]) -> tuple[int, ...]:
    """Return the expert of each slot, so that every expert that the rank already holds keeps its slot.

    Args:
        held: expert in each slot of the rank now.
        experts: experts that the rank will hold.
    """
    left = list(experts)
    slots: list[int | None] = [None] * len(left)
    for slot, expert in enumerate(held[: len(slots)]):
        if expert in left:
            slots[slot] = expert
            left.remove(expert)
    return tuple(left.pop(0) if expert is None else expert for expert in slots)


def _replicas(tokens: Sequence[int], node_slots: Sequence[int], floor: int) -> Replicas:
    return allocate(np.asarray(tokens, dtype=np.int64), sum(node_slots), floor)


def _on_nodes(
    stage: StageExperts, wanted: Mapping[int, Placement]
) -> tuple[list[dict[int, list[int]]], list[Placement]]:
    """Return two lists with an entry for each layer: the experts that each node holds, and the wanted placement."""
    of_nodes = list(stage.ranks_by_node.values())
    held = []
    for layer in wanted:
        rows = stage.held.get(layer) or [()] * len(stage.nodes)
        held.append({node: [expert for rank in ranks for expert in rows[rank]] for node, ranks in enumerate(of_nodes)})
    return held, list(wanted.values())


def _inside(experts: Sequence[int], ranks: int, slots: int, loads: Sequence[float]) -> Placement:
    """Return the experts of each rank of a node.

    Replicas of an expert go to different ranks if possible, and the ranks get about equally many tokens.
    """
    numbers, counts = np.unique(np.asarray(experts, dtype=np.int64), return_counts=True)
    rows = spread(counts.astype(np.int64), [slots] * ranks, [loads[expert] for expert in numbers.tolist()])
    return tuple(tuple(int(numbers[index]) for index in row) for row in rows)
