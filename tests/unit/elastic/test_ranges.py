"""Resharding sends each element once to each rank that needs it, and reports elements that no rank has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moevement_core.elastic.digest import of_range, together
from moevement_core.elastic.ranges import ElementRange, Move, reshard

STATE = {"a": 100, "b": 37, "c": 1}


def cut(ranks: int, seed: int) -> dict[int, list[ElementRange]]:
    """Return shards of the state on ``ranks`` ranks, with random bounds; each element is in one shard."""
    draw = np.random.default_rng(seed)
    shards: dict[int, list[ElementRange]] = {rank: [] for rank in range(ranks)}
    for name, size in STATE.items():
        edges = sorted({0, size, *draw.integers(0, size + 1, ranks - 1).tolist()})
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            shards[number].append(ElementRange(name, begin, end))
    return shards


def test_a_worked_example() -> None:
    """Check four shards that become three after the loss of rank 1. Rank 2 has a copy of the lost shard."""
    held = {
        0: [ElementRange("m", 0, 3)],
        2: [ElementRange("m", 3, 6), ElementRange("m", 6, 9)],
        3: [ElementRange("m", 9, 12)],
    }
    wanted = {0: [ElementRange("m", 0, 4)], 2: [ElementRange("m", 4, 8)], 3: [ElementRange("m", 8, 12)]}
    assert reshard(held, wanted).moves == (
        Move(0, 0, ElementRange("m", 0, 3)), Move(2, 0, ElementRange("m", 3, 4)), Move(2, 2, ElementRange("m", 4, 8)),
        Move(2, 3, ElementRange("m", 8, 9)), Move(3, 3, ElementRange("m", 9, 12)),
    )  # fmt: skip


def test_what_is_lost_is_said_and_copies_share_the_sending() -> None:
    held = {0: [ElementRange("m", 0, 8)], 1: [ElementRange("m", 0, 8)]}
    plan = reshard(held, {rank: [ElementRange("m", 0, 10)] for rank in range(2, 6)})
    assert dict(plan.missing) == {rank: (ElementRange("m", 8, 10),) for rank in range(2, 6)}
    assert [move.source for move in plan.moves] == [0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(60))
def test_state_is_the_same_in_any_cut(seed: int) -> None:
    draw = np.random.default_rng(seed)
    before, after = (int(draw.integers(1, 7)) for _ in range(2))
    held, wanted = cut(before, seed), cut(after, seed + 1000)
    whole = {name: draw.integers(0, 2**32, size, dtype=np.uint32) for name, size in STATE.items()}
    plan = reshard(held, wanted)
    assert not plan.missing
    assert all(_within(move.range, held[move.source]) for move in plan.moves)
    got = {
        rank: {piece.name: np.full(STATE[piece.name], 7, np.uint32) for piece in ranges}
        for rank, ranges in wanted.items()
    }
    moved = {rank: 0 for rank in wanted}
    for move in plan.moves:
        part = slice(move.range.begin, move.range.end)
        got[move.target][move.range.name][part] = whole[move.range.name][part]
        moved[move.target] += move.range.size
    assert moved == {rank: sum(piece.size for piece in ranges) for rank, ranges in wanted.items()}, "each element once"

    def digest(shards: dict[int, list[ElementRange]], of_rank: dict[int, dict[str, np.ndarray]] | None) -> int:
        return together(
            of_range(
                piece.name, piece.begin, (of_rank[rank] if of_rank else whole)[piece.name][piece.begin : piece.end]
            )
            for rank, ranges in shards.items() for piece in ranges
        )  # fmt: skip

    assert digest(held, None) == digest(wanted, got)
    victim = next(move.range for move in plan.moves if move.range.size)
    rank = next(rank for rank, ranges in wanted.items() if any(_within(victim, [piece]) for piece in ranges))
    got[rank][victim.name][victim.begin] ^= 1
    assert digest(held, None) != digest(wanted, got), "a bit has flipped"


def _within(piece: ElementRange, others: list[ElementRange]) -> bool:
    covered = sum(
        max(0, min(piece.end, other.end) - max(piece.begin, other.begin))
        for other in others
        if other.name == piece.name
    )
    return covered == piece.size


def test_a_digest_sees_moved_lost_and_doubled_elements() -> None:
    row = np.arange(8, dtype=np.float32)
    whole = of_range("w", 0, row)
    assert whole == together([of_range("w", 0, row[:3]), of_range("w", 3, row[3:])])
    assert whole != of_range("w", 0, row[::-1].copy())
    assert whole != of_range("w", 1, row)
    assert whole != of_range("v", 0, row)
    assert whole != together([whole, of_range("w", 0, row[:1])])
    zeros = np.zeros(4, dtype=np.float16)
    assert of_range("w", 0, zeros) != of_range("w", 0, zeros[:3])
    assert of_range("w", 0, zeros) != of_range("w", 0, -zeros)
    long = np.arange(3 << 20, dtype=np.uint8)
    assert of_range("w", 5, long) == together(
        [of_range("w", 5, long[:1234567]), of_range("w", 1234572, long[1234567:])]
    )


@pytest.mark.parametrize(
    ("held", "pattern"),
    [([ElementRange("m", 0, 3), ElementRange("m", 2, 4)], r"\brank 0\b.*\bm\b.*\b0, 3\b.*\b2, 4\b"),
     ([ElementRange("m", 3, 3)], r"'m'.*\b3\b.*\b3\b"), ([ElementRange("m", -1, 3)], r"'m'.*-1\b.*\b3\b")],
)  # fmt: skip
def test_what_cannot_be_held_is_said(held: list[ElementRange], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        reshard({0: held}, {})
