"""Pure parts of the benchmark of one MoE layer under uneven loads: tables of experts, loads of ranks, and the page."""

from __future__ import annotations

import pytest

from benchmarks.papers.imbalance import HEADER, Kind, Passes, Shape, plain_table, report, rows, slot_table, slowest

SHAPE = Shape(tokens=1024)


def test_expert_parallelism_has_each_expert_once() -> None:
    assert plain_table(SHAPE) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("ratio", "replicas"),
    # Eight experts need eight of the twelve slots. With even loads, four experts get one of the others each.
    [(1, [1, 1, 1, 1, 2, 2, 2, 2]), (4, [5, 1, 1, 1, 1, 1, 1, 1])],
)
def test_slots_follow_the_load(ratio: int, replicas: list[int]) -> None:
    table = slot_table(SHAPE, ratio)
    assert [len(row) for row in table] == [6, 6]
    assert [sum(row.count(expert) for row in table) for expert in range(8)] == replicas


def test_tokens_of_the_most_loaded_rank() -> None:
    """Check 4:1 by hand: expert 0 has 512 of 1,024 tokens; three others beside it have 74, 73 and 73 tokens."""
    assert slowest(SHAPE, 1, Kind.PLAIN) == slowest(SHAPE, 1, Kind.SLOTS) == 1.0
    assert slowest(SHAPE, 4, Kind.PLAIN) == pytest.approx((512 + 74 + 73 + 73) / 512, abs=0.003)
    assert slowest(SHAPE, 8, Kind.PLAIN) == 2.0
    # Two of the five replicas of expert 0 are on one rank, with four other experts, and three on the other with three.
    assert slowest(SHAPE, 4, Kind.SLOTS) == pytest.approx((512 * 3 / 5 + 3 * 73) / 512, abs=0.01)


def test_the_page_has_medians_and_ratios_of_one_run() -> None:
    times = {
        (1, Kind.PLAIN): [Passes(1.0, 2.0, 0.0)],
        (1, Kind.SLOTS): [Passes(1.1, 2.1, 0.3)],
        (8, Kind.PLAIN): [Passes(2.0, 4.0, 0.0), Passes(9.0, 9.0, 0.0), Passes(1.9, 4.1, 0.0)],
        (8, Kind.SLOTS): [Passes(1.25, 2.75, 1.0)],
    }
    first, second, third, last = rows(SHAPE, times)
    assert {len(row) for row in (first, second, third, last)} == {len(HEADER)}
    assert third[:8] == ["8:1", "plain", "2.00", "2000", "1,024", "0.50", "6000", "0.50"]
    assert last[3:] == ["1250", "1,638", "0.88", "4000", "0.80", "1000", "1.60", "1.50", "1.20"]
    assert "Medians of 1 rounds" in report(SHAPE, times)
