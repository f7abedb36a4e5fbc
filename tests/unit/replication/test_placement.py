"""Copies go evenly to other nodes, or the error has the numbers of nodes and copies."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.errors import ConfigError
from moevement_core.replication.placement import (
    Copies,
    PlacementKind,
    _near_redundancy,
    all_sources,
    allowed_copies,
    place,
    sources_of,
)
from tests.unit.growth import assert_linear


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
    ("nodes", "replicas", "pattern"),
    [
        ([0, 0, 0], 2, r"\b2 replicas\b.*\b0\b.*\b0\b.*--moevement-replicas\b"),
        ([0, 1, 1], 2, r"\b2 replicas\b.*\b1\b.*\b1\b.*--moevement-replicas\b"),
        ([0, 1], 2, r"\b2 replicas\b.*\b2 ranks\b"),
        ([0, 1], -1, r"-1 replicas\b"),
    ],
)
def test_too_few_nodes_are_refused_with_the_numbers(nodes: list[int], replicas: int, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        place(nodes, replicas)


def test_one_node_serves_if_that_is_asked_for() -> None:
    placement = place(["a"] * 4, 2, same_node=True)
    assert all(rank not in peers and len(set(peers)) == 2 for rank, peers in enumerate(placement))
    assert set(Counter(peer for peers in placement for peer in peers).values()) == {2}
    across = place(["a", "a", "b", "b"], 1, same_node=True)
    assert all((rank < 2) != (peers[0] < 2) for rank, peers in enumerate(across)), "other nodes come first"


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    replicas=st.integers(2, 6),
    kind=st.sampled_from(list(PlacementKind)),
)
def test_copies_stay_at_home_only_where_the_other_nodes_have_theirs(
    sizes: list[int], replicas: int, kind: PlacementKind
) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    if not len(sizes) <= replicas < len(nodes):
        return
    placement = place(nodes, replicas, kind, same_node=True)
    for rank, peers in enumerate(placement):
        assert len(peers) == len(set(peers)) == replicas
        assert rank not in peers
        assert {nodes[peer] for peer in peers} - {nodes[rank]}, "the loss of its node loses no copy of it"
    if len(set(sizes)) > 1:
        return  # to keep loads even, some nodes have no copy of some ranks
    assert all(
        set(nodes) - {nodes[rank]} <= {nodes[peer] for peer in holders} for rank, holders in enumerate(placement)
    )
    again = place(nodes, replicas, kind, same_node=True, before=placement)
    assert [set(peers) for peers in again] == [set(peers) for peers in placement], "nobody's copies are rebuilt"


# After a failure


@given(
    sizes=st.lists(st.integers(1, 4), min_size=4, max_size=7),
    replicas=st.integers(1, 2),
    lost=st.integers(0, 6),
    seed=st.integers(0, 10),
)
def test_only_who_has_to_change_peers_does(sizes: list[int], replicas: int, lost: int, seed: int) -> None:
    """Check that no rank changes its peers when a node is lost and its ranks move to a node of spares.

    The exception is a rank whose copies had to share a node, because nodes have unequal sizes: it gets better peers.
    """
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    before = place(nodes, replicas)
    lost_node = lost % len(sizes)
    after = [len(sizes) if node == lost_node else node for node in nodes]
    placement = place(after, replicas, before=before)
    for old_peers, peers in zip(before, placement, strict=True):
        if len({nodes[peer] for peer in old_peers}) == len(old_peers):
            assert sorted(peers) == sorted(old_peers)
        else:
            assert len({after[peer] for peer in peers}) >= len({nodes[peer] for peer in old_peers})


def test_loads_stay_even_over_many_failures() -> None:
    draw = random.Random(7)
    nodes: list[int] = [rank // 8 for rank in range(96)]
    placement = place(nodes, 2)
    changed = []
    for failure in range(50):
        lost = draw.choice(sorted(set(nodes)))
        spare = draw.choice([node for node in range(14) if node not in nodes] or [lost])
        nodes = [spare if node == lost else node for node in nodes]
        newer = place(nodes, 2, before=placement)
        changed.append(sum(set(a) != set(b) for a, b in zip(placement, newer, strict=True)))
        placement = newer
        assert max(Counter(peer for peers in placement for peer in peers).values()) <= 3, failure
    assert sum(changed) == 0, "ranks of a node stay together here"


def test_a_rank_that_now_shares_a_node_with_its_peer_gets_another() -> None:
    before = place([0, 1, 2, 3], 1)
    assert before == [(1,), (2,), (3,), (0,)]
    after = place([0, 0, 2, 3], 1, before=before)
    assert after[1:] == before[1:], "the others keep theirs"
    assert after[0] in ((2,), (3,))


@pytest.mark.parametrize(
    ("nodes", "replicas", "same_node", "is_running", "wanted", "warning"),
    [
        ([0, 1, 2], None, False, False, Copies(2, False), None),
        ([0], None, False, False, Copies(0, True), None),
        ([0, 0, 0], 1, True, False, Copies(1, True), None),
        ([0, 0, 0], 2, False, False, Copies(2, False), None),  # place() refuses it
        ([0, 1], 2, False, True, Copies(1, False), r"\b1\b.*\b2\b.*\b1\b.*\bnodes?\b"),
        ([0, 0], 2, True, True, Copies(1, True), r"\b2 ranks\b.*\bnode\b.*\b1\b"),
        ([0], 1, True, True, Copies(0, True), r"\bone rank\b"),
    ],
)
def test_copies_are_as_many_as_were_asked_for(
    nodes: list[int], replicas: int | None, same_node: bool, is_running: bool, wanted: Copies, warning: str | None
) -> None:
    copies = allowed_copies(nodes, replicas, same_node=same_node, is_running=is_running)
    assert replace(copies, warning=None) == wanted
    assert (copies.warning is None) == (warning is None)
    assert re.search(warning or "", copies.warning or "")


def test_what_the_nodes_do_not_allow_is_warned_of() -> None:
    one_node = allowed_copies([0, 0, 0, 0], None, same_node=False, is_running=False)
    assert (one_node.replicas, one_node.same_node) == (2, True)
    assert re.search(r"\b4 ranks\b.*\bnode\b.*\b2\b", str(one_node.warning))
    two_nodes = allowed_copies([0, 0, 1, 1], None, same_node=False, is_running=False)
    assert (two_nodes.replicas, two_nodes.same_node) == (1, False)
    assert re.search(r"\b1\b.*\b2\b.*\b1\b.*\bnodes?\b", str(two_nodes.warning))
    # A node was lost, and its ranks moved to the only other node, which then holds the copies, too.
    after = allowed_copies([0, 0, 0, 0], 1, same_node=False, is_running=True)
    assert (after.replicas, after.same_node) == (1, True)
    assert after.warning is not None


def by_looking_at_all(
    nodes: list[int], replicas: int, groups: list[list[int]], kept: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Choose peers as the product does, but compare all ranks for each choice."""
    group_of = {rank: set(group) for group in groups for rank in group}
    load = Counter(peer for peers in kept for peer in peers)
    placement = []
    for rank, node in enumerate(nodes):
        chosen = list(kept[rank])
        while len(chosen) < replicas:
            used = {node, *(nodes[peer] for peer in chosen)}
            others = [peer for peer in range(len(nodes)) if nodes[peer] != node and peer not in chosen]
            ranked = [
                (
                    load[peer] >= replicas, nodes[peer] in used, peer not in group_of.get(rank, ()), load[peer],
                    (peer - rank) % len(nodes), peer,
                )
                for peer in others
            ]  # fmt: skip
            best = min(ranked)[-1]
            chosen.append(best)
            load[best] += 1
        placement.append(tuple(chosen))
    return placement


@given(
    sizes=st.lists(st.integers(1, 6), min_size=4, max_size=8),
    replicas=st.integers(1, 3),
    group_size=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_the_quick_choice_of_peers_is_the_best_of_all(
    sizes: list[int], replicas: int, group_size: int, seed: int
) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    drawn = random.Random(seed)
    drawn.shuffle(nodes)
    groups = [list(range(first, len(nodes), group_size)) for first in range(group_size)]
    others = [[peer for peer in range(len(nodes)) if nodes[peer] != node] for node in nodes]
    kept = [tuple(drawn.sample(candidates, drawn.randint(0, min(replicas, len(candidates))))) for candidates in others]
    assert _near_redundancy(nodes, replicas, groups, kept) == by_looking_at_all(nodes, replicas, groups, kept)


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=4), min_size=10, max_size=10))
def test_all_sources_are_those_of_each_rank(placement: list[list[int]]) -> None:
    expected = [sources_of([tuple(peers) for peers in placement], rank) for rank in range(10)]
    assert all_sources(placement, 10) == expected


@pytest.mark.parametrize("kind", PlacementKind)
def test_a_placement_takes_time_linear_in_the_ranks(kind: PlacementKind) -> None:
    def placed(ranks: int) -> None:
        where = [rank // 8 for rank in range(ranks)]
        groups = [list(range(first, ranks, ranks // 16)) for first in range(ranks // 16)]
        before = place(where, 2, kind, groups)
        where[:8] = [ranks] * 8  # the first eight ranks are on another node
        before[:8] = [()] * 8
        place(where, 2, kind, groups, before=before)
        all_sources(before, ranks)

    assert_linear(lambda ranks: partial(placed, ranks), 512)
