"""Migration to a new placement: which experts each node gets, and which node sends them (Lazarus, section 4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moevement_core.elastic.placement import Placement


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of one expert's state from a node that holds it to a node that needs it."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Migration:
    """Migration of a cluster to a new placement.

    Attributes:
        experts: experts in the slots of each node after the migration.
        transfers: transfers between live nodes.
        missing: experts that no live node holds, each with the nodes that need it. The state of these experts comes
            from copies.
    """

    experts: Mapping[int, tuple[int, ...]]
    transfers: tuple[Transfer, ...]
    missing: Mapping[int, tuple[int, ...]]


def migrate(held: Mapping[int, Sequence[int]], wanted: Placement) -> Migration:
    """Return a migration that gives each node the experts of one place in ``wanted``, with few transfers.

    The function assigns places to nodes greedily. If fewer transfers are needed with the k-th place for the k-th node,
    it assigns the places so. An expert comes from the holder that has sent the fewest experts so far.

    Args:
        held: experts on each node that takes part; empty for a new node.
        wanted: experts of each place; there are as many places as nodes.

    Raises:
        ValueError: the numbers of nodes and of places differ.
    """
    nodes = sorted(held)
    if len(nodes) != len(wanted):
        raise ValueError(f"{len(nodes)} nodes, but {len(wanted)} places; both numbers must be equal")
    in_order = dict(zip(nodes, wanted, strict=True))
    greedy = _greedy(held, wanted)
    experts = min(greedy, in_order, key=lambda mapping: _fetched(held, mapping))
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


def _greedy(held: Mapping[int, Sequence[int]], wanted: Placement) -> dict[int, tuple[int, ...]]:
    """Return the experts of each node. The pair of node and place with the fewest missing experts is assigned first."""
    pairs = sorted(
        (len(set(place) - set(held[node])), node, number) for node in held for number, place in enumerate(wanted)
    )
    mapping: dict[int, tuple[int, ...]] = {}
    taken: set[int] = set()
    for _, node, number in pairs:
        if node not in mapping and number not in taken:
            mapping[node] = wanted[number]
            taken.add(number)
    return mapping


def _fetched(held: Mapping[int, Sequence[int]], mapping: Mapping[int, Sequence[int]]) -> int:
    return sum(len(set(place) - set(held[node])) for node, place in mapping.items())


def _needed(held: Mapping[int, Sequence[int]], mapping: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the nodes that need each expert and do not hold it, by expert."""
    needed: dict[int, list[int]] = {}
    for node in sorted(mapping):
        for expert in sorted(set(mapping[node]) - set(held[node])):
            needed.setdefault(expert, []).append(node)
    return needed
