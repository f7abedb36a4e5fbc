"""From one placement to another: which node takes which place, and who sends what (Lazarus, section 4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moevement_core.elastic.placement import Placement


@dataclass(frozen=True, slots=True)
class Transfer:
    """The state of an expert, from a node that has it to one that is to have it."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Migration:
    """What takes a cluster to a new placement.

    Attributes:
        experts: that each node has afterwards, in its slots.
        transfers: between nodes that live.
        missing: experts that nobody who lives has, and the nodes that are to have them: from copies.
    """

    experts: Mapping[int, tuple[int, ...]]
    transfers: tuple[Transfer, ...]
    missing: Mapping[int, tuple[int, ...]]


def migrate(held: Mapping[int, Sequence[int]], wanted: Placement) -> Migration:
    """Give the places of ``wanted`` to nodes greedily, and what a node lacks comes from the owner that sends least.

    Never more transfers than when nodes take places in the order of their names.

    Args:
        held: experts that each node has that is to take part; none, where it is new.
        wanted: one place for each of these nodes.

    Raises:
        ValueError: other numbers of nodes and of places.
    """
    nodes = sorted(held)
    if len(nodes) != len(wanted):
        raise ValueError(f"{len(nodes)} nodes for {len(wanted)} places; needs a place for each node")
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
    for expert in sorted(needed, key=lambda one: (len(owners.get(one, ())), one)):  # those without a choice first
        if expert not in owners:
            missing[expert] = tuple(needed[expert])
            continue
        for target in needed[expert]:
            source = min(owners[expert], key=lambda node: (sends[node], node))
            sends[source] += 1
            transfers.append(Transfer(expert, source, target))
    return Migration(experts, tuple(transfers), missing)


def _greedy(held: Mapping[int, Sequence[int]], wanted: Placement) -> dict[int, tuple[int, ...]]:
    """Again and again the pair of a node and a place that needs the fewest experts."""
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
    """By expert, the nodes that do not have it and are to."""
    needed: dict[int, list[int]] = {}
    for node in sorted(mapping):
        for expert in sorted(set(mapping[node]) - set(held[node])):
            needed.setdefault(expert, []).append(node)
    return needed
