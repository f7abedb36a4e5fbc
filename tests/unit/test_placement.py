"""Copies go to other nodes, evenly, or the configuration is refused with the numbers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.errors import ConfigError
from moevement_core.replication.placement import PlacementKind, place, sources_of


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    replicas=st.integers(0, 4),
    kind=st.sampled_from(list(PlacementKind)),
    group_size=st.integers(1, 4),
)
def test_every_copy_is_on_another_node(sizes: list[int], replicas: int, kind: PlacementKind, group_size: int) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    groups = [list(range(first, len(nodes), group_size)) for first in range(group_size)]
    if replicas >= len(sizes):
        with pytest.raises(ConfigError):
            place(nodes, replicas, kind, groups)
        return
    placement = place(nodes, replicas, kind, groups)
    for rank, peers in enumerate(placement):
        assert len(peers) == len(set(peers)) == replicas
        assert nodes[rank] not in {nodes[peer] for peer in peers}
        assert all(rank in sources_of(placement, peer) for peer in peers)


@pytest.mark.parametrize(("nodes", "per_node", "replicas"), [(2, 1, 1), (4, 8, 2), (12, 8, 3), (3, 4, 2)])
def test_equal_nodes_carry_equal_loads_on_as_many_nodes_as_copies(nodes: int, per_node: int, replicas: int) -> None:
    where = [rank // per_node for rank in range(nodes * per_node)]
    placement = place(where, replicas)
    assert set(Counter(peer for peers in placement for peer in peers).values()) == {replicas}
    assert all(len({where[peer] for peer in peers}) == replicas for peers in placement)


def test_redundancy_prefers_ranks_with_the_same_state() -> None:
    # Two stages of four ranks on four nodes of two; data-parallel peers are on all nodes.
    where = [0, 0, 1, 1, 2, 2, 3, 3]
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    placement = place(where, 2, PlacementKind.REDUNDANCY, groups)
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    assert all(group_of[peer] == group_of[rank] for rank, peers in enumerate(placement) for peer in peers)
    assert set(Counter(peer for peers in placement for peer in peers).values()) == {2}


def test_without_peers_of_the_same_state_redundancy_goes_elsewhere() -> None:
    placement = place([0, 1, 2], 2, PlacementKind.REDUNDANCY, [[0], [1], [2]])
    assert [sorted(peers) for peers in placement] == [[1, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize(
    ("nodes", "replicas", "found"),
    [
        ([0, 0, 0], 2, r"2 replicas on other nodes, of which there are 0.*at most 0 replicas"),
        ([0, 1, 1], 2, "2 replicas on other nodes, of which there are 1"),
        ([0, 1], 2, "2 replicas among 2 ranks"),
        ([0, 1], -1, "-1 replicas"),
    ],
)
def test_too_few_nodes_are_refused_with_the_numbers(nodes: list[int], replicas: int, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        place(nodes, replicas)


def test_one_node_serves_if_that_is_asked_for() -> None:
    placement = place(["a"] * 4, 2, same_node=True)
    assert all(rank not in peers and len(set(peers)) == 2 for rank, peers in enumerate(placement))
    assert set(Counter(peer for peers in placement for peer in peers).values()) == {2}
    across = place(["a", "a", "b", "b"], 1, same_node=True)
    assert all((rank < 2) != (peers[0] < 2) for rank, peers in enumerate(across)), "other nodes come first"
