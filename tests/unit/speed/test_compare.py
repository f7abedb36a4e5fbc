"""Comparison of ranks with their peers: what makes a rank slow, and what does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from moevement_core.speed.compare import BLOCK, BLOCKS, RankSpeed, compare, compare_links
from moevement_core.speed.phases import PHASES

Times = Callable[[int, int], tuple[float, float]]
"""Function of a rank and a block that returns the seconds of an iteration's forward and backward pass and update."""


def speeds(ranks: int, times: Times, links: Sequence[tuple[tuple[int, float], ...]] | None = None) -> list[RankSpeed]:
    return [
        RankSpeed(
            1000 + rank,
            tuple(tuple(BLOCK * second for second in times(rank, block)) for block in range(BLOCKS)),
            links[rank] if links is not None else (),
        )
        for rank in range(ranks)
    ]


def slow(reports: Sequence[RankSpeed], stages: Sequence[int], threshold: float = 1.2) -> dict[int, float]:
    return {rank: round(each.factor, 2) for rank, each in compare(reports, stages).items() if each.least >= threshold}


def test_a_report_survives_its_way_as_bytes() -> None:
    report = RankSpeed(7, tuple((0.5 * block, 0.25) for block in range(BLOCKS)), ((3, 1e6), (4, math.inf)))
    assert RankSpeed.decode(report.encode()) == report
    assert RankSpeed.decode(RankSpeed(9).encode()) == RankSpeed(9)
    assert len(report.encode()) < 100


@pytest.mark.parametrize("ranks", [2, 3, 8, 33])
@pytest.mark.parametrize("phase", PHASES)
def test_the_rank_that_takes_longer_is_slow_and_its_phase_is_named(ranks: int, phase: str) -> None:
    times = (1.5, 1.0) if phase == PHASES[0] else (1.0, 1.5)
    reports = speeds(ranks, lambda rank, block: times if rank == 1 else (1.0, 1.0))
    assert slow(reports, [0] * ranks) == {1: 1.25}
    assert compare(reports, [0] * ranks)[1].phase == phase


def test_stages_do_different_work_and_are_not_compared() -> None:
    reports = speeds(4, lambda rank, block: (3.0 if rank < 2 else 1.0, 0.1))
    assert slow(reports, [0, 0, 1, 1]) == {}
    reports = speeds(4, lambda rank, block: (3.0 if rank < 2 else 1.3 if rank == 3 else 1.0, 0.1))
    assert list(slow(reports, [0, 0, 1, 1])) == [3]


def test_a_rank_alone_in_its_stage_or_without_times_is_not_compared() -> None:
    reports = speeds(3, lambda rank, block: (9.0 if rank == 2 else 1.0, 1.0))
    assert compare(reports, [0, 0, 1]).keys() == {0, 1}
    reports[1] = RankSpeed(1001)
    assert compare(reports, [0, 0, 0]).keys() == {0, 2}
    assert compare([RankSpeed(1)] * 3, [0, 0, 0]) == {}


def test_half_of_the_ranks_can_be_slow() -> None:
    reports = speeds(8, lambda rank, block: (1.5 if rank >= 4 else 1.0, 0.0))
    assert slow(reports, [0] * 8).keys() == {4, 5, 6, 7}


def test_one_pause_makes_nobody_slow() -> None:
    reports = speeds(4, lambda rank, block: (30.0 if (rank, block) == (2, 1) else 1.0, 0.1))
    assert slow(reports, [0] * 4) == {}


def test_a_load_that_moves_makes_nobody_slow() -> None:
    """Let a popular expert make one rank after the other take twice as long."""
    for seed in range(50):
        draw = random.Random(seed)
        popular = [draw.randrange(8) for _ in range(BLOCKS)]
        reports = speeds(8, lambda rank, block, popular=popular: (2.0 if rank == popular[block] else 1.0, 0.1))  # type: ignore[misc]
        if len(set(popular)) > 1:
            assert slow(reports, [0] * 8) == {}


def test_ranks_that_take_no_time_are_equal() -> None:
    assert slow(speeds(3, lambda rank, block: (0.0, 0.0)), [0] * 3) == {}


RING = 4
"""Number of nodes of a rank each; the copies of a rank go to the next one."""


def ring(rates: dict[int, float]) -> list[RankSpeed]:
    """Return the reports of a ring of ranks, in which a rank's link to the next has the given rate, or 1 GB/s."""
    links = [(((rank + 1) % RING, rates.get(rank, 1e9)),) for rank in range(RING)]
    return speeds(RING, lambda rank, block: (1.0, 1.0), links)


NODES = [f"n{rank}" for rank in range(RING)]


def test_the_node_with_slow_links_in_both_directions_explains_them() -> None:
    explained = compare_links(ring({1: 1e8, 2: 1e8}), NODES)
    assert explained.keys() == {2}, "rank 1 sends to rank 2, and rank 2 sends"
    assert explained[2].factor == pytest.approx(10)


def test_a_single_slow_link_counts_for_its_sender() -> None:
    assert compare_links(ring({1: 1e8}), NODES).keys() == {1}


def test_links_that_are_all_slow_or_keep_up_name_nobody() -> None:
    assert compare_links(ring(dict.fromkeys(range(RING), 1e6)), NODES) == {}
    assert compare_links(ring({1: 1e8, 0: math.inf, 2: math.inf, 3: math.inf}), NODES) == {}
    assert compare_links(ring({1: 0.5e9}), NODES) == {}
    assert compare_links(ring({1: math.inf}), NODES) == {}
    assert compare_links(speeds(2, lambda rank, block: (1.0, 1.0)), ["a", "b"]) == {}


def test_all_ranks_of_a_node_with_a_slow_link_are_named() -> None:
    """Two ranks on each of two nodes send to the other node, and node b can neither send nor receive quickly."""
    links = [((2, 1e8),), ((3, 1e8),), ((0, 1e8),), ((1, 1e8),)]
    others = [((5, 1e9),), ((4, 1e9),), ((7, 1e9),), ((6, 1e9),), ((4, 1e9),)]
    reports = speeds(9, lambda rank, block: (1.0, 1.0), [*links, *others])
    nodes = ["a", "a", "b", "b", "c", "d", "d", "c", "c"]
    assert compare_links(reports, nodes).keys() in ({0, 1}, {2, 3})
