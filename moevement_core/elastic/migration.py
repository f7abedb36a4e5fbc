"""Migration to a new placement: which experts each node gets, and which node sends them (Lazarus, section 4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moevement_core.elastic.placement import Placement

Held = Mapping[int, Sequence[int]]
"""Experts that each node holds before the migration, by node; empty for a node that the job adds."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of one expert's state from a node that holds it to a node that needs it."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Migration:
    """Migration of one layer to a new placement.

    Attributes:
        experts: experts in the slots of each node after the migration.
        transfers: transfers between live nodes.
        missing: experts that no live node holds, each with the nodes that need it. The state of these experts comes
            from copies.
    """

    experts: Mapping[int, tuple[int, ...]]
    transfers: tuple[Transfer, ...]
    missing: Mapping[int, tuple[int, ...]]


def assign_places(held: Sequence[Held], wanted: Sequence[Placement]) -> dict[int, int]:
    """Return the place that each node gets, so that few experts have to move.

    A place is an entry of a placement: the experts that one node will hold. All layers share one mapping of nodes to
    places, so the groups of experts of all layers are on the same nodes. If each layer had a mapping of its own, the
    replicas of some expert would be on a small set of nodes more often, and the job would survive fewer failures.

    The k-th place has as many experts as the k-th node has slots. A node gets a place with as many experts as it has
    slots. The function prefers to give the k-th node the k-th place. If a greedy assignment needs fewer transfers, it
    uses that one. The time is quadratic in the number of nodes.

    Args:
        held: for each layer, experts that each node holds now; the nodes are the same in all layers.
        wanted: for each layer, experts of each place; there are as many places as nodes.

    Raises:
        ValueError: the numbers of nodes and of places differ.
    """
    nodes = sorted(held[0])
    for placement in wanted:
        if len(nodes) != len(placement):
            raise ValueError(f"{len(nodes)} nodes, but a placement for {len(placement)}; both numbers must be equal")
    fetched = np.zeros((len(nodes), len(nodes)), dtype=np.int64)
    for of_layer, placement in zip(held, wanted, strict=True):
        fetched += _fetched([of_layer[node] for node in nodes], placement)
    sizes = [len(place) for place in wanted[0]]
    greedy = _greedy(fetched, sizes)
    in_order = range(len(nodes))
    order = np.arange(len(nodes))
    places = in_order if fetched[order, order].sum() <= fetched[order, greedy].sum() else greedy
    return dict(zip(nodes, map(int, places), strict=True))


def migrate(held: Held, wanted: Placement, places: Mapping[int, int] | None = None) -> Migration:
    """Return the migration of one layer. An expert comes from the holder that has sent the fewest experts so far.

    Args:
        held: experts that each node holds now; empty for a node that the job adds.
        wanted: experts of each place; there are as many places as nodes.
        places: place of each node, from :func:`assign_places` for all layers. None to choose places for this layer
            alone.

    Raises:
        ValueError: the numbers of nodes and of places differ.
    """
    places = assign_places([held], [wanted]) if places is None else places
    nodes = sorted(held)
    experts = {node: wanted[places[node]] for node in nodes}
    owners: dict[int, list[int]] = {}
    for node in nodes:
        for expert in set(held[node]):
            owners.setdefault(expert, []).append(node)
    sends: Counter[int] = Counter()
    transfers, missing = [], {}
    needed = _needed(held, experts)
    # Experts with the fewest holders come first, because they leave the least choice of a source.
    for expert in sorted(needed, key=lambda item: (len(owners.get(item, ())), item)):
        if expert not in owners:
            missing[expert] = tuple(needed[expert])
            continue
        for target in needed[expert]:
            source = min(owners[expert], key=lambda node: (sends[node], node))
            sends[source] += 1
            transfers.append(Transfer(expert, source, target))
    return Migration(experts, tuple(transfers), missing)


def _fetched(held: Sequence[Sequence[int]], wanted: Placement) -> npt.NDArray[np.int64]:
    """Return how many experts each node would have to fetch if it got each place, int64 ``[nodes, places]``."""
    experts = 1 + max((expert for rows in (held, wanted) for row in rows for expert in row), default=0)

    def present(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        table = np.zeros((len(rows), experts), dtype=np.float32)
        for number, row in enumerate(rows):
            table[number, list(row)] = 1.0
        return table

    return np.rint((1.0 - present(held)) @ present(wanted).T).astype(np.int64)


def _greedy(fetched: npt.NDArray[np.int64], sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the place of each node. The pair of node and place with the fewest experts to fetch is assigned first."""
    count = len(sizes)
    places = np.full(count, -1, dtype=np.int64)
    is_taken = np.zeros(count, dtype=bool)
    for pair in np.argsort(fetched, axis=None, kind="stable").tolist():
        node, place = divmod(pair, count)
        if places[node] < 0 and not is_taken[place] and sizes[node] == sizes[place]:
            places[node], is_taken[place] = place, True
    return places


def _needed(held: Held, mapping: Held) -> dict[int, list[int]]:
    """Return for each expert the nodes that will hold it and do not hold it now."""
    needed: dict[int, list[int]] = {}
    for node in sorted(mapping):
        for expert in sorted(set(mapping[node]) - set(held[node])):
            needed.setdefault(expert, []).append(node)
    return needed
