"""Every rank is in a group, no node has two parts of a group, and holders keep about equal amounts."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moevement_core.errors import ConfigError
from moevement_core.replication.parity.groups import groups_still_fit, make_groups, narrowed
from tests.unit.growth import assert_linear


@example(2, 1, [3, 3, 3])
@given(st.integers(2, 9), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=3, max_size=24))
def test_any_nodes_that_may_be_lost_have_one_part_each(members: int, parities: int, ranks: list[int]) -> None:
    nodes = [node for node, count in enumerate(ranks) for _ in range(count)]
    if len(ranks) < members + parities:
        asked, available, needed = rf"\bparity:{members}\+{parities}\b", rf"\b{len(ranks)} nodes\b", members + parities
        with pytest.raises(ConfigError, match=rf"{asked}.*{available}.*\b{needed}\b"):
            make_groups(nodes, members, parities)
        narrow, fewer = narrowed(nodes, members, parities)
        assert narrow + fewer <= len(ranks)
        assert fewer == min(parities, len(ranks) - 1)
        return
    groups = make_groups(nodes, members, parities)
    assert sorted(rank for group in groups for rank in group.members) == list(range(len(nodes)))
    for group in groups:
        assert len(group.members) <= members
        assert len(group.holders) == parities
        parts = [nodes[rank] for rank in (*group.members, *group.holders)]
        assert len(set(parts)) == len(parts)
    assert groups_still_fit(groups, nodes, members, parities)
    assert not groups_still_fit(groups, [0] * len(nodes), members, parities)
    assert not groups_still_fit(groups, nodes, members, parities + 1)
    if len(set(ranks)) == 1:
        load = Counter(nodes[rank] for group in groups for rank in group.holders)
        spread = [load.get(node, 0) for node in range(len(ranks))]
        assert max(spread) - min(spread) <= max(1, parities)


def test_as_paper_sized_clusters_have_them() -> None:
    groups = make_groups([rank // 8 for rank in range(96)], 4, 1)
    assert len(groups) == 24
    assert all(len(group.members) == 4 for group in groups)
    assert max(Counter(rank for group in groups for rank in group.holders).values()) <= 1, (
        "a block for every fourth rank"
    )


def test_groups_take_time_linear_in_the_ranks() -> None:
    assert_linear(lambda ranks: partial(make_groups, [rank // 8 for rank in range(ranks)], 4, 1), 1024)
