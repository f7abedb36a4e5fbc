"""How many losses of nodes at once leave a copy of everything, under GEMINI's placement: exact, without enumeration.

A checkpoint is lost when its own node and all nodes that keep copies of it are. In a group that is the whole group; in
the ring it is as many nodes in a row (GEMINI, SOSP '23, section 4 and its theorem 1).
"""

from __future__ import annotations

from fractions import Fraction
from math import comb


def survival(nodes: int, replicas: int, lost: int) -> Fraction:
    """The share of all sets of ``lost`` nodes whose loss leaves a copy of every checkpoint.

    Args:
        nodes: of the job, more than ``replicas``.
        replicas: r, copies beside a node's own.
        lost: k, nodes that are lost at once.
    """
    if not 0 <= lost <= nodes:
        return Fraction(0)
    return Fraction(survivable_sets(nodes, replicas)[lost], comb(nodes, lost))


def survivable_sets(nodes: int, replicas: int) -> list[int]:
    """How many sets of k nodes may be lost, for k from 0 to ``nodes``."""
    size = replicas + 1
    groups = nodes // size if nodes % size == 0 else nodes // size - 1
    ring = nodes - groups * size
    sets = _without_run_in_ring(ring, size) if ring else [1]
    group = [comb(size, lost) for lost in range(size)]  # all but the whole of it
    for _ in range(groups):
        sets = _product(sets, group)
    return sets + [0] * (nodes + 1 - len(sets))


def _without_run_in_ring(nodes: int, run: int) -> list[int]:
    """Sets of k nodes of a ring among which no ``run`` stand in a row, for k from 0 to ``nodes``.

    With the place of the first node that stays, what follows is a row in which every node that stays ends a run.
    """
    sets = [0] * (nodes + 1)
    for leading in range(run):  # lost nodes before the first that stays
        row = {leading: {0: 1}}  # by nodes lost, by the length of the run under way
        for _ in range(nodes - leading - 1):
            row = _next(row, run)
        for lost, by_run in row.items():
            for trailing, count in by_run.items():
                if trailing + leading < run:  # both are one run around the ring
                    sets[lost] += count
    return sets


def _next(row: dict[int, dict[int, int]], run: int) -> dict[int, dict[int, int]]:
    after: dict[int, dict[int, int]] = {}
    for lost, by_run in row.items():
        for length, count in by_run.items():
            stays = after.setdefault(lost, {})
            stays[0] = stays.get(0, 0) + count
            if length + 1 < run:
                goes = after.setdefault(lost + 1, {})
                goes[length + 1] = goes.get(length + 1, 0) + count
    return after


def _product(left: list[int], right: list[int]) -> list[int]:
    product = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    return product
