"""The closed form of what GEMINI's placement survives, against every set of nodes there is."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from moevement_core.replication.placement import PlacementKind, peer_nodes, place
from moevement_core.replication.survival import survivable_sets, survival


@pytest.mark.parametrize(
    ("nodes", "replicas"), [(nodes, replicas) for replicas in (1, 2, 3) for nodes in range(replicas + 1, 12)]
)
def test_against_enumeration(nodes: int, replicas: int) -> None:
    holders = [{node, *peers} for node, peers in enumerate(peer_nodes(nodes, replicas))]
    for lost in range(nodes + 1):
        kept = sum(all(not its <= set(gone) for its in holders) for gone in combinations(range(nodes), lost))
        assert survivable_sets(nodes, replicas)[lost] == kept
        assert survival(nodes, replicas, lost) == Fraction(kept, comb(nodes, lost))


def test_papers_example() -> None:
    """Of pairs, one loss of both in 16 machines: 8 of 120 pairs."""
    assert survival(16, 1, 2) == 1 - Fraction(8, 120)
    assert survival(16, 1, 1) == 1


def test_ranks_keep_copies_of_the_rank_at_their_place() -> None:
    nodes = [node for node in range(5) for _ in range(2)]
    peers = place(nodes, 1, PlacementKind.GROUPS)
    assert peers == [(2,), (3,), (0,), (1,), (6,), (7,), (8,), (9,), (4,), (5,)], "one pair, and a ring of three"
    load = [sum(rank in its for its in peers) for rank in range(10)]
    assert load == [1] * 10
