"""Plan of the ranges of state that ranks send to each other when the number of ranks of a job changes.

A state tensor is a flat row of elements. Its name does not depend on how many ranks share the state. Each rank owns
ranges of such tensors before the change, and other ranges after it. A range is either a whole tensor, or a shard of a
distributed optimizer. The bounds of shards depend on the number of ranks.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class ElementRange(NamedTuple):
    """Range of elements of a state tensor, from ``begin`` to before ``end``."""

    name: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements in the range."""
        return self.end - self.begin


class Move(NamedTuple):
    """Move of a range from a rank that holds it to a rank that needs it. Both may be the same rank."""

    source: int
    target: int
    range: ElementRange


class Resharding(NamedTuple):
    """Plan that gives every rank the ranges that it needs after the change.

    Attributes:
        moves: moves by ascending receiving rank. Moves to one rank are in the order of the ranges that this rank needs.
            Each needed element arrives once.
        missing: ranges that no rank holds, by the rank that needs them.
    """

    moves: tuple[Move, ...]
    missing: Mapping[int, tuple[ElementRange, ...]]


def reshard(held: Mapping[int, Sequence[ElementRange]], wanted: Mapping[int, Sequence[ElementRange]]) -> Resharding:
    """Return the moves that bring every wanted range to the rank that wants it.

    If this rank already holds the range, it is also the source of the move. Otherwise, the source is the holder with
    the fewest elements to send so far. The result is the same on every rank that passes the same arguments.

    Args:
        held: ranges of each rank before the change. Ranges of one tensor on one rank do not overlap; several ranks may
            hold the same range.
        wanted: ranges of each rank after the change.

    Raises:
        ValueError: a range is empty or backward, or a rank holds an element twice.
    """
    holders = _by_tensor(held)
    sends: Counter[int] = Counter()
    moves: list[Move] = []
    missing: dict[int, tuple[ElementRange, ...]] = {}
    for target in sorted(wanted):
        gaps: list[ElementRange] = []
        for needed in wanted[target]:
            _check(needed)
            here = holders.get(needed.name, {})
            if _holds(here.get(target, []), needed):  # This is the usual case, which needs no other holder.
                moves.append(Move(target, target, needed))
                continue
            for piece in _cut(needed, here):
                sources = [rank for rank, cuts in here.items() if _holds(cuts, piece)]
                if not sources:
                    gaps.append(piece)
                    continue
                source = target if target in sources else min(sources, key=lambda rank: (sends[rank], rank))
                sends[source] += piece.size if source != target else 0
                moves.append(Move(source, target, piece))
        if gaps:
            missing[target] = tuple(gaps)
    return Resharding(tuple(_joined(moves)), missing)


Cuts = list[tuple[int, int]]
"""Ranges of one tensor on one rank, as pairs of begin and end, ascending."""


def _by_tensor(held: Mapping[int, Sequence[ElementRange]]) -> dict[str, dict[int, Cuts]]:
    by_tensor: dict[str, dict[int, Cuts]] = {}
    for rank in sorted(held):
        for held_range in held[rank]:
            _check(held_range)
            by_tensor.setdefault(held_range.name, {}).setdefault(rank, []).append((held_range.begin, held_range.end))
    for name, of_ranks in by_tensor.items():
        for rank, cuts in of_ranks.items():
            cuts.sort()
            if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(cuts)):
                raise ValueError(
                    f"rank {rank} holds elements of {name} twice: {cuts}; needs ranges that do not overlap"
                )
    return by_tensor


def _check(checked: ElementRange) -> None:
    if not 0 <= checked.begin < checked.end:
        raise ValueError(f"{checked}; needs a begin of 0 or more, and an end above it")


def _cut(whole: ElementRange, holders: Mapping[int, Cuts]) -> Iterator[ElementRange]:
    """Yield the pieces of a range, cut where a range of any holder begins or ends.

    So each holder has either the whole piece or nothing of it.
    """
    edges = {whole.begin, whole.end}
    for cuts in holders.values():
        edges.update(edge for cut in cuts for edge in cut if whole.begin < edge < whole.end)
    ordered = sorted(edges)
    for begin, end in itertools.pairwise(ordered):
        yield ElementRange(whole.name, begin, end)


def _holds(cuts: Cuts, piece: ElementRange) -> bool:
    place = bisect_right(cuts, (piece.begin, 2**63)) - 1
    return place >= 0 and cuts[place][1] >= piece.end


def _joined(moves: Sequence[Move]) -> Iterator[Move]:
    """Yield the moves, with adjacent ranges of the same source and target joined."""
    last: Move | None = None
    for move in moves:
        if last is not None and move[:2] == last[:2] and move.range[:2] == (last.range.name, last.range.end):
            last = Move(last.source, last.target, ElementRange(last.range.name, last.range.begin, move.range.end))
            continue
        if last is not None:
            yield last
        last = move
    if last is not None:
        yield last
