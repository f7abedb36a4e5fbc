"""Planning of sums that yield lost snapshots from parity and the other snapshots of their group. Sends nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moevement_core.recovery.holdings import Holding, Place, Source, Sum, SumTerm
from moevement_core.replication.parity.code import recover


@dataclass(frozen=True, slots=True)
class SumPart:
    """Description of one member's snapshot in a parity sum."""

    owner: int
    state: int
    schedule: str
    contents: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Summed:
    """Description of a parity block that a rank holds. It contains each member's snapshot wholly or not at all."""

    iteration: int
    members: tuple[int, ...]
    """Ranks of the group."""
    size: tuple[int, int]
    """Numbers of members and of parity blocks for which the erasure code has coefficients.

    See :attr:`~moevement_core.replication.parity.groups.Group.size`.
    """
    number: int
    parts: tuple[SumPart, ...]
    """Snapshots of the members that are in the block."""


def places_in_sums(
    reported: Mapping[int, Sequence[Summed]], places: Mapping[int, Mapping[int, Sequence[Place]]]
) -> Iterator[Place]:
    """Yield a place for each snapshot that no rank holds but that ranks can compute from parity.

    Args:
        reported: blocks of parity that each rank holds.
        places: places of snapshots, by owner and iteration.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, int, Summed]]] = defaultdict(list)
    for rank, held in sorted(reported.items()):
        for block in held:
            alike[block.iteration, block.members, block.size, block.parts].append((block.number, rank, block))
    for (iteration, *_, parts), blocks in sorted(alike.items(), key=lambda each: each[0][0]):
        group = blocks[0][2]
        here = {part.owner: places.get(part.owner, {}).get(iteration, ()) for part in parts}
        lost = [part for part in parts if not here[part.owner]]
        distinct = sorted({number: (number, rank) for number, rank, _ in reversed(blocks)}.values())[: len(lost)]
        if not lost or len(distinct) < len(lost):
            continue
        place_of = {owner: place for place, owner in enumerate(group.members)}
        known = [owner for owner, locations in here.items() if locations]
        ways = recover(
            [place_of[part.owner] for part in lost], [place_of[owner] for owner in known],
            [number for number, _ in distinct], group.size,
        )  # fmt: skip
        for part in lost:
            of_members, of_blocks = ways[place_of[part.owner]]
            terms = []
            for owner in known:
                source, holder, _ = min(here[owner], key=lambda place: (place[0], place[1] != owner, place[1]))
                terms.append(SumTerm(holder, source, owner, of_members[place_of[owner]]))
            terms += [SumTerm(rank, Source.PARITY, group.members[0], of_blocks[number]) for number, rank in distinct]
            holder = distinct[-1][1]
            holding = Holding(
                owner=part.owner, iteration=iteration, state=part.state, schedule=part.schedule, contents=part.contents,
                source=Source.PARITY, sum=Sum(tuple(term for term in terms if term.coefficient), part.nbytes),
            )  # fmt: skip
            yield Source.PARITY, holder, holding
