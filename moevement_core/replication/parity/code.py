"""Coefficients of the sums that form a group's parity, and of the sums that give lost members back.

A member is a rank of the group, or rather its snapshot. The coefficients form a Cauchy matrix: every square submatrix
has an inverse (Blömer et al., ICSI TR-95-048). The columns are scaled so that the first row is all ones. So the first
block of parity is the XOR of the members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import xor

from moevement_core.errors import ConfigError
from moevement_core.replication.parity.field import inverse, product, solve

MOST = 128
"""Largest number of members and blocks of parity that a group may have together."""


@cache
def coefficients(members: int, parities: int) -> tuple[tuple[int, ...], ...]:
    """Return the coefficient of each member in each block of parity, elements of GF(256) ``[parities][members]``.

    Raises:
        ConfigError: there are more than :data:`MOST` members and blocks together, or no members, or no blocks.
    """
    if not members >= 1 or not parities >= 1 or members + parities > MOST:
        raise ConfigError(
            f"a parity group has {members} ranks and {parities} blocks of parity; needs 1 or more of each, and "
            f"at most {MOST} together"
        )
    rows = [[inverse(row ^ (parities + column)) for column in range(members)] for row in range(parities)]
    first = [inverse(value) for value in rows[0]]
    return tuple(tuple(map(product, row, first)) for row in rows)


def recover(
    lost: Sequence[int], members: Sequence[int], parities: Sequence[int], size: tuple[int, int]
) -> dict[int, tuple[Mapping[int, int], Mapping[int, int]]]:
    """Return the coefficients that compute each lost member from available members and blocks of parity.

    Args:
        lost: positions of the lost members in the group.
        members: positions of the available members whose snapshots are in the blocks.
        parities: numbers of the blocks of parity to use, as many as there are lost members.
        size: number of members of the job's largest groups, and number of blocks of parity; see :attr:`Group.size`.

    Returns:
        For each lost member: the coefficient of each available member, by position, and of each block, by number.
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
