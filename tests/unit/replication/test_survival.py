"""Losses that GEMINI's placement survives, counted over every set of nodes (GEMINI, SOSP '23, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import pytest

from moevement_core.replication.placement import PlacementKind, peer_nodes, place


def surviving_sets(nodes: int, replicas: int, lost: int) -> int:
    """Return how many sets of ``lost`` nodes leave a copy of every checkpoint."""
    return _counted(nodes, peer_nodes(nodes, replicas), lost)


def _counted(nodes: int, peers: Sequence[Sequence[int]], lost: int) -> int:
    holders = [{node, *group} for node, group in enumerate(peers)]
    return sum(all(not group <= set(failed) for group in holders) for failed in combinations(range(nodes), lost))


JOBS = [(nodes, replicas) for replicas in (1, 2, 3) for nodes in range(replicas + 1, 12)]


@pytest.mark.parametrize(("nodes", "replicas"), JOBS)
def test_as_many_losses_as_there_are_copies_are_survived(nodes: int, replicas: int) -> None:
    for lost in range(replicas + 1):
        assert surviving_sets(nodes, replicas, lost) == comb(nodes, lost)
    assert surviving_sets(nodes, replicas, nodes) == 0


@pytest.mark.parametrize(("nodes", "replicas"), JOBS)
def test_groups_survive_at_least_as_many_sets_as_a_ring(nodes: int, replicas: int) -> None:
    """Check theorem 1: if r + 1 divides the number of nodes, no placement survives more losses of r + 1 nodes."""
    ring = [[(node + step) % nodes for step in range(1, replicas + 1)] for node in range(nodes)]
    assert surviving_sets(nodes, replicas, replicas + 1) >= _counted(nodes, ring, replicas + 1)


def test_the_papers_example() -> None:
    """Lose two of 16 machines that keep copies in pairs. Of the 120 sets of two machines, 8 are such a pair."""
    assert surviving_sets(16, 1, 2) == 120 - 8
    assert surviving_sets(16, 1, 1) == 16


def test_ranks_keep_copies_of_the_rank_at_their_place() -> None:
    nodes = [node for node in range(5) for _ in range(2)]
    peers = place(nodes, 1, PlacementKind.GROUPS)
    assert peers == [(2,), (3,), (0,), (1,), (6,), (7,), (8,), (9,), (4,), (5,)], "one pair, and a ring of three"
    load = [sum(rank in kept_by_rank for kept_by_rank in peers) for rank in range(10)]
    assert load == [1] * 10
