"""Resharding brings each element to each rank that is to have it, once, and says what nobody has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moevement_core.elastic.digest import of_range, together
from moevement_core.elastic.ranges import Move, Range, reshard

STATE = {"a": 100, "b": 37, "c": 1}


def cut(ranks: int, seed: int) -> dict[int, list[Range]]:
    """All of the state once, in shards that fall anywhere."""
    draw = np.random.default_rng(seed)
    shards: dict[int, list[Range]] = {rank: [] for rank in range(ranks)}
    for name, size in STATE.items():
        edges = sorted({0, size, *draw.integers(0, size + 1, ranks - 1).tolist()})
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            shards[number].append(Range(name, begin, end))
    return shards


def test_a_worked_example() -> None:
    """Four shards become three; the second rank is gone, and a copy of its shard is with the third."""
    held = {0: [Range("m", 0, 3)], 2: [Range("m", 3, 6), Range("m", 6, 9)], 3: [Range("m", 9, 12)]}
    wanted = {0: [Range("m", 0, 4)], 2: [Range("m", 4, 8)], 3: [Range("m", 8, 12)]}
    assert reshard(held, wanted).moves == (
        Move(0, 0, Range("m", 0, 3)), Move(2, 0, Range("m", 3, 4)), Move(2, 2, Range("m", 4, 8)),
        Move(2, 3, Range("m", 8, 9)), Move(3, 3, Range("m", 9, 12)),
    )  # fmt: skip


def test_what_is_lost_is_said_and_copies_share_the_sending() -> None:
    held = {0: [Range("m", 0, 8)], 1: [Range("m", 0, 8)]}
    made = reshard(held, {rank: [Range("m", 0, 10)] for rank in range(2, 6)})
    assert dict(made.missing) == {rank: (Range("m", 8, 10),) for rank in range(2, 6)}
    assert [move.source for move in made.moves] == [0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(60))
def test_state_is_the_same_in_any_cut(seed: int) -> None:
    draw = np.random.default_rng(seed)
    before, after = (int(draw.integers(1, 7)) for _ in range(2))
    held, wanted = cut(before, seed), cut(after, seed + 1000)
    whole = {name: draw.integers(0, 2**32, size, dtype=np.uint32) for name, size in STATE.items()}
    made = reshard(held, wanted)
    assert not made.missing
    assert all(_within(move.range, held[move.source]) for move in made.moves)
    got = {rank: {one.name: np.full(STATE[one.name], 7, np.uint32) for one in its} for rank, its in wanted.items()}
    moved = {rank: 0 for rank in wanted}
    for move in made.moves:
        part = slice(move.range.begin, move.range.end)
        got[move.target][move.range.name][part] = whole[move.range.name][part]
        moved[move.target] += move.range.size
    assert moved == {rank: sum(one.size for one in its) for rank, its in wanted.items()}, "each element once"

    def digest(shards: dict[int, list[Range]], of_rank: dict[int, dict[str, np.ndarray]] | None) -> int:
        return together(
            of_range(one.name, one.begin, (of_rank[rank] if of_rank else whole)[one.name][one.begin : one.end])
            for rank, its in shards.items() for one in its
        )  # fmt: skip

    assert digest(held, None) == digest(wanted, got)
    victim = next(move.range for move in made.moves if move.range.size)
    rank = next(rank for rank, its in wanted.items() if any(_within(victim, [one]) for one in its))
    got[rank][victim.name][victim.begin] ^= 1
    assert digest(held, None) != digest(wanted, got), "a bit has flipped"


def _within(one: Range, others: list[Range]) -> bool:
    covered = sum(
        max(0, min(one.end, other.end) - max(one.begin, other.begin)) for other in others if other.name == one.name
    )
    return covered == one.size


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
    ("held", "found"),
    [([Range("m", 0, 3), Range("m", 2, 4)], r"\brank 0\b.*\bm\b.*\b0, 3\b.*\b2, 4\b"),
     ([Range("m", 3, 3)], r"'m'.*\b3\b.*\b3\b"), ([Range("m", -1, 3)], r"'m'.*-1\b.*\b3\b")],
)  # fmt: skip
def test_what_cannot_be_held_is_said(held: list[Range], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        reshard({0: held}, {})
