"""Maximum rank overlap survives node losses as often as its closed form says, and as often as any other placement."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from moevement_core.elastic.allocation import Replicas, allocate
from moevement_core.elastic.placement import (
    Placement,
    compact,
    experts_lost,
    maximum_rank_overlap,
    place,
    spread,
    survival,
)
from moevement_core.errors import ConfigError


def counted(placement: Placement, lost: int) -> Fraction:
    """Return the share of all sets of ``lost`` nodes whose loss leaves each expert a replica."""
    sets = list(combinations(range(len(placement)), lost))
    return Fraction(sum(not experts_lost(placement, nodes) for nodes in sets), len(sets))


def every_placement(replicas: Replicas, nodes: int, slots: int) -> Iterator[Placement]:
    """Yield every placement of the replicas, up to the order of nodes."""

    def fill(left: tuple[int, ...], nodes: int, least: tuple[int, ...]) -> Iterator[Placement]:
        if not nodes:
            yield ()
            return
        for node in bags(left, slots):
            if node >= least:
                after = tuple(count - node.count(expert) for expert, count in enumerate(left))
                for tail in fill(after, nodes - 1, node):
                    yield (node, *tail)

    yield from fill(tuple(replicas.tolist()), nodes, ())


def bags(left: tuple[int, ...], size: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    if not size:
        yield ()
        return
    for expert in range(first, len(left)):
        if left[expert]:
            after = tuple(count - (place == expert) for place, count in enumerate(left))
            for tail in bags(after, size - 1, expert):
                yield (expert, *tail)


def test_the_papers_example() -> None:
    """Check plan B of figure 4: 4 experts on 5 nodes of 4 slots. It survives 7 of the 10 ways to lose 3 nodes."""
    replicas = np.array([2, 4, 6, 8])
    placement = maximum_rank_overlap(replicas, [4] * 5)
    assert all(set(node) == {0, 1, 2, 3} for node in placement[:2])
    assert survival(replicas, 5, 4, 3) == counted(placement, 3) == Fraction(7, 10)


@pytest.mark.parametrize("seed", range(60))
def test_the_closed_form_counts_every_set_of_nodes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    nodes, slots = int(draw.integers(1, 8)), int(draw.integers(1, 5))
    experts = int(draw.integers(1, nodes * slots + 1))
    replicas = allocate(np.floor(draw.pareto(1.0, experts) * 50).astype(int), nodes * slots, int(draw.integers(1, 4)))
    placement = maximum_rank_overlap(replicas, [slots] * nodes)
    assert Counter(expert for node in placement for expert in node) == dict(enumerate(replicas.tolist()))
    assert all(len(node) == slots for node in placement)
    for lost in range(nodes + 1):
        assert survival(replicas, nodes, slots, lost) == counted(placement, lost), (replicas, nodes, slots, lost)
    assert survival(replicas, nodes, slots, nodes + 1) == 0


@pytest.mark.parametrize(
    ("replicas", "nodes", "slots"),
    [([1, 2, 3], 3, 2), ([2, 2, 2, 2], 4, 2), ([1, 2, 2, 3], 4, 2), ([1, 1, 2, 5], 3, 3), ([2, 3, 5], 5, 2),
     ([1, 3, 4, 4], 4, 3)],
)  # fmt: skip
def test_no_placement_survives_more(replicas: list[int], nodes: int, slots: int) -> None:
    counts = np.array(replicas)
    survivals = [counted(maximum_rank_overlap(counts, [slots] * nodes), lost) for lost in range(nodes + 1)]
    seen = 0
    for placement in every_placement(counts, nodes, slots):
        seen += 1
        assert all(counted(placement, lost) <= best for lost, best in enumerate(survivals)), placement
    assert seen > 1


def test_where_the_theorem_does_not_hold() -> None:
    """Check a case in which another placement survives more losses.

    Maximum rank overlap puts both replicas of the last expert on one node, so the loss of that node loses the expert.
    """
    replicas = np.array([1, 1, 2, 2, 2])
    other = ((0, 1), (2, 3), (2, 4), (3, 4))
    assert survival(replicas, 4, 2, 1) == Fraction(2, 4)
    assert counted(other, 1) == Fraction(3, 4)


@pytest.mark.parametrize("seed", range(100))
def test_fewer_losses_than_the_floor_are_survived(seed: int) -> None:
    draw = np.random.default_rng(seed)
    nodes, slots, floor = (int(draw.integers(low, high)) for low, high in ((1, 8), (1, 5), (1, 4)))
    experts = int(draw.integers(1, nodes * slots // min(floor, nodes) + 1))
    replicas = allocate(np.floor(draw.pareto(1.0, experts) * 50).astype(int), nodes * slots, floor)
    survived = counted(place(replicas, [slots] * nodes, floor), min(floor, int(replicas.min()), nodes) - 1)
    assert survived == 1, (replicas, nodes, slots, floor)


def test_maximum_rank_overlap_alone_would_not_survive_them() -> None:
    replicas = np.array([2, 2, 2])
    assert survival(replicas, 3, 2, 1) == Fraction(2, 3)
    assert counted(place(replicas, [2] * 3, 2), 1) == 1


def test_placements_that_it_is_compared_with_survive_less() -> None:
    """Compare placements of more experts than a node has slots, with skewed loads, as in figure 8 of the paper."""
    replicas = allocate([1, 1, 2, 2, 3, 4, 6, 8, 8, 9, 12, 14, 20, 30, 60, 90], 60, 2)
    of_overlap = survival(replicas, 10, 6, 4)
    of_spread, of_compact = (counted(placer(replicas, [6] * 10), 4) for placer in (spread, compact))
    assert of_overlap > of_spread > of_compact


@pytest.mark.parametrize("placer", [maximum_rank_overlap, spread, compact])
@pytest.mark.parametrize(("replicas", "nodes", "slots"), [([1, 2], 2, 2), ([0, 4], 2, 2), ([2, 2], 2, 0)])
def test_what_cannot_be_is_said(placer: object, replicas: list[int], nodes: int, slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(str(replicas))}.*\b{nodes} nodes\b.*\b{slots} slots\b"):
        placer(np.array(replicas), [slots] * nodes)  # type: ignore[operator]
