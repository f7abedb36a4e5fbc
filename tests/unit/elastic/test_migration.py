"""A migration sends each node the experts that it lacks, spread evenly over the owners.

It never sends more than if the wanted sets of experts were assigned to the nodes in order.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from moevement_core.elastic.allocation import allocate
from moevement_core.elastic.migration import Transfer, migrate
from moevement_core.elastic.placement import maximum_rank_overlap


def test_a_worked_example() -> None:
    """Check that nodes 5 and 7 keep their experts, and that the new node 2 gets one expert from each of them."""
    migration = migrate({2: (), 5: (0, 1), 7: (2, 3)}, ((2, 3), (0, 1), (1, 2)))
    assert migration.experts == {7: (2, 3), 5: (0, 1), 2: (1, 2)}
    assert set(migration.transfers) == {Transfer(1, 5, 2), Transfer(2, 7, 2)}
    assert not migration.missing


def test_what_nobody_has_comes_from_elsewhere() -> None:
    migration = migrate({0: (0, 0), 1: (1, 0)}, ((0, 1), (0, 2)))
    assert migration.missing == {2: (1,)} or migration.missing == {2: (0,)}
    assert len(migration.transfers) <= 1


@pytest.mark.parametrize("seed", range(100))
def test_every_node_gets_what_it_is_to_have(seed: int) -> None:
    draw = np.random.default_rng(seed)
    nodes, slots = int(draw.integers(2, 7)), int(draw.integers(1, 5))
    experts = int(draw.integers(1, nodes * slots))

    def placement(count: int) -> tuple[tuple[int, ...], ...]:
        return maximum_rank_overlap(allocate(draw.integers(0, 50, experts), count * slots, 2), [slots] * count)

    if (nodes - 1) * slots < experts:
        return
    before = dict(enumerate(placement(nodes)))
    before.pop(int(draw.integers(nodes)))
    wanted = placement(nodes - 1)
    migration = migrate(before, wanted)
    assert sorted(migration.experts.values()) == sorted(wanted)
    held = {node: set(expert_ids) for node, expert_ids in before.items()}
    for transfer in migration.transfers:
        assert transfer.expert in held[transfer.source]
        assert transfer.expert not in held[transfer.target]
    got = {node: set(expert_ids) for node, expert_ids in held.items()}
    for transfer in migration.transfers:
        got[transfer.target].add(transfer.expert)
    for expert, targets in migration.missing.items():
        assert not any(expert in expert_ids for expert_ids in held.values())
        for target in targets:
            got[target].add(expert)
    assert all(set(expert_ids) <= got[node] for node, expert_ids in migration.experts.items())
    in_order = sum(len(set(place) - held[node]) for node, place in zip(sorted(held), wanted, strict=True))
    moved = len(migration.transfers) + sum(map(len, migration.missing.values()))
    assert moved <= in_order
    best = min(
        sum(len(set(place) - held[node]) for node, place in zip(sorted(held), order, strict=True))
        for order in permutations(wanted)
    )
    assert best <= moved <= 2 * best + 1, "greedy is near the best mapping"


def test_owners_share_the_sending() -> None:
    held = {0: (0,), 1: (0,), **{node: () for node in range(2, 8)}}
    sends = Counter(transfer.source for transfer in migrate(held, ((0,),) * 8).transfers)
    assert sends == {0: 3, 1: 3}


def test_a_place_for_each_node() -> None:
    with pytest.raises(ValueError, match=r"\b2 nodes\b.*\b1\b"):
        migrate({0: (), 1: ()}, ((0,),))
