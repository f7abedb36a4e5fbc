"""From one cut of flat state over ranks to another: who sends which range to whom, when a job's world has changed.

A tensor of state is a flat row of elements with a name that does not depend on the layout. Ranks own ranges of it
before and after: shards of a distributed optimizer, which fall elsewhere on fewer ranks, or whole replicas.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """Elements of a tensor of state."""

    name: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.end - self.begin


class Move(NamedTuple):
    """A range that a rank has and one, which may be itself, is to have."""

    source: int
    target: int
    range: Range


class Resharding(NamedTuple):
    """What brings state from one cut to another.

    Attributes:
        moves: in the order of targets, then of what they want; each wanted element comes once.
        missing: by target, what nobody has.
    """

    moves: tuple[Move, ...]
    missing: Mapping[int, tuple[Range, ...]]


def reshard(held: Mapping[int, Sequence[Range]], wanted: Mapping[int, Sequence[Range]]) -> Resharding:
    """Every wanted range, from the target itself where it holds it, else from the holder that has sent least so far.

    The same on every rank that calls it with the same arguments.

    Args:
        held: by rank, before; of one rank, ranges of a tensor do not overlap. Several ranks may hold the same.
        wanted: by rank, afterwards.

    Raises:
        ValueError: a range is empty or backward, or a rank holds an element twice.
    """
    holders = _by_tensor(held)
    sends: Counter[int] = Counter()
    moves: list[Move] = []
    missing: dict[int, tuple[Range, ...]] = {}
    for target in sorted(wanted):
        gaps: list[Range] = []
        for one in wanted[target]:
            _check(one)
            here = holders.get(one.name, {})
            if _holds(here.get(target, []), one):  # most are, and nobody else need be looked at
                moves.append(Move(target, target, one))
                continue
            for piece in _cut(one, here):
                sources = [rank for rank, its in here.items() if _holds(its, piece)]
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
"""Of one tensor on one rank: begins and ends, ascending."""


def _by_tensor(held: Mapping[int, Sequence[Range]]) -> dict[str, dict[int, Cuts]]:
    found: dict[str, dict[int, Cuts]] = {}
    for rank in sorted(held):
        for one in held[rank]:
            _check(one)
            found.setdefault(one.name, {}).setdefault(rank, []).append((one.begin, one.end))
    for name, of_ranks in found.items():
        for rank, cuts in of_ranks.items():
            cuts.sort()
            if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(cuts)):
                raise ValueError(
                    f"rank {rank} holds elements of {name} twice: {cuts}; needs ranges that do not overlap"
                )
    return found


def _check(one: Range) -> None:
    if not 0 <= one.begin < one.end:
        raise ValueError(f"{one} is no range; needs 0 or more, and an end after its beginning")


def _cut(one: Range, holders: Mapping[int, Cuts]) -> Iterator[Range]:
    """Where any holder's range begins or ends."""
    edges = {one.begin, one.end}
    for cuts in holders.values():
        edges.update(edge for cut in cuts for edge in cut if one.begin < edge < one.end)
    ordered = sorted(edges)
    for begin, end in itertools.pairwise(ordered):
        yield Range(one.name, begin, end)


def _holds(cuts: Cuts, piece: Range) -> bool:
    place = bisect_right(cuts, (piece.begin, 2**63)) - 1
    return place >= 0 and cuts[place][1] >= piece.end


def _joined(moves: Sequence[Move]) -> Iterator[Move]:
    """Pieces that follow each other and go the same way are one."""
    last: Move | None = None
    for move in moves:
        if last is not None and move[:2] == last[:2] and move.range[:2] == (last.range.name, last.range.end):
            last = Move(last.source, last.target, Range(last.range.name, last.range.begin, move.range.end))
            continue
        if last is not None:
            yield last
        last = move
    if last is not None:
        yield last
