"""Coefficients of members' bytes in a group's parity, and recovery of lost members' bytes from the bytes that are left.

The code is a Cauchy matrix, of which every square part has an inverse (Blömer et al., ICSI TR-95-048). Its columns are
scaled so that the first row is all ones: one block of parity is XOR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import xor

from moevement_core.errors import ConfigError
from moevement_core.replication.parity.field import inverse, product, solve

MOST = 128
"""Most members of a group and blocks of parity, together."""


@cache
def coefficients(members: int, parities: int) -> tuple[tuple[int, ...], ...]:
    """Return the coefficient of each member in each block of parity, elements of GF(256) ``[parities][members]``.

    Raises:
        ConfigError: there are more than :data:`MOST` members and blocks together, or none of either.
    """
    if not members >= 1 or not parities >= 1 or members + parities > MOST:
        raise ConfigError(f"parity of {members} ranks in {parities} blocks; needs 1 or more of each, {MOST} together")
    rows = [[inverse(row ^ (parities + column)) for column in range(members)] for row in range(parities)]
    first = [inverse(value) for value in rows[0]]
    return tuple(tuple(map(product, row, first)) for row in rows)


def recover(
    lost: Sequence[int], members: Sequence[int], parities: Sequence[int], size: tuple[int, int]
) -> dict[int, tuple[Mapping[int, int], Mapping[int, int]]]:
    """Return how each lost member follows from the others and from as many blocks of parity as there are lost members.

    Args:
        lost: positions in the group of the lost members.
        members: positions of available members that the blocks contain.
        parities: numbers of the available blocks.
        size: members of a whole group, and blocks of parity.

    Returns:
        By lost member: the coefficient of each of ``members``, and of each of ``parities``.
    """
    matrix = coefficients(*size)
    rows = solve([[matrix[number][place] for place in lost] for number in parities])
    return {
        place: (
            {
                member: reduce(xor, (product(row[at], matrix[number][member]) for at, number in enumerate(parities)))
                for member in members
            },
            dict(zip(parities, row, strict=True)),
        )
        for place, row in zip(lost, rows, strict=True)
    }
