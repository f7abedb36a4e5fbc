"""On which nodes replicas of experts are: maximum rank overlap, which survives lost nodes best (Lazarus, theorem 1).

Experts are sorted by replicas and cut into groups of as many as a node has slots; each group has nodes of its own, as
many as its scarcest expert has replicas, and every one of those nodes has all of the group. So a group is lost only
with all of its nodes, and nothing else counts. What is left of replicas fills the vacant slots.

The theorem says that no placement survives more. It holds where the last group gets as many nodes as its scarcest
expert has replicas. Where fewer are left, replicas of that expert share nodes, and another placement may survive more,
even the loss of fewer nodes than the floor: tests have small cases. :func:`place` looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import comb

import numpy as np
import numpy.typing as npt

from moevement_core.elastic.allocation import Replicas
from moevement_core.errors import ConfigError

Placement = tuple[tuple[int, ...], ...]
"""The experts in the slots of each node, ascending; an expert may be there more than once."""


def maximum_rank_overlap(replicas: Replicas, nodes: int, slots: int) -> Placement:
    """Lazarus's placement.

    Args:
        replicas: of each expert; together ``nodes * slots``.
        nodes: N.
        slots: c, of each node.

    Raises:
        ConfigError: replicas do not fill the slots, or an expert has none.
    """
    _check(replicas, nodes, slots)
    left = replicas.copy()
    placed: list[list[int]] = [[] for _ in range(nodes)]
    first = 0
    for group, count in _groups(replicas, nodes, slots):
        for node in placed[first : first + count]:
            node.extend(group)
        left[group] -= count
        first += count
    _fill(placed, left, slots)
    return tuple(tuple(sorted(node)) for node in placed)


def place(replicas: Replicas, nodes: int, slots: int, floor: int) -> Placement:
    """Lazarus's placement where it survives the loss of any ``floor - 1`` nodes; round robin, which does, where not.

    Args:
        replicas: of each expert, ``floor`` or more where there are slots for it; together ``nodes * slots``.
        nodes: N.
        slots: c, of each node.
        floor: f.

    Raises:
        ConfigError: replicas do not fill the slots, or an expert has none.
    """
    _check(replicas, nodes, slots)
    lost = min(floor, int(replicas.min()), nodes) - 1
    return (maximum_rank_overlap if survival(replicas, nodes, slots, lost) == 1 else spread)(replicas, nodes, slots)


def spread(replicas: Replicas, nodes: int, slots: int) -> Placement:
    """Round robin: each expert's replicas on nodes in a row, so on as many as it has replicas, or on all."""
    _check(replicas, nodes, slots)
    every = np.repeat(np.arange(replicas.size), replicas)
    return tuple(tuple(every[node::nodes].tolist()) for node in range(nodes))


def compact(replicas: Replicas, nodes: int, slots: int) -> Placement:
    """Node after node filled, expert after expert; to compare with."""
    _check(replicas, nodes, slots)
    every = np.repeat(np.arange(replicas.size), replicas)
    return tuple(tuple(every[node * slots : (node + 1) * slots].tolist()) for node in range(nodes))


def survival(replicas: Replicas, nodes: int, slots: int, lost: int) -> Fraction:
    """The share of all sets of ``lost`` nodes after whose loss every expert has a replica, with
    :func:`maximum_rank_overlap`: that of the sets that leave a node of each group.
    """
    if not 0 <= lost <= nodes:
        return Fraction(0)
    sizes = [count for _, count in _groups(replicas, nodes, slots)]
    alive = [comb(nodes - sum(sizes), kept) for kept in range(nodes - sum(sizes) + 1)]  # by how many nodes are
    for size in sizes:
        group = [0, *(comb(size, kept) for kept in range(1, size + 1))]
        alive = np.convolve(np.array(alive, dtype=object), np.array(group, dtype=object)).tolist()
    return Fraction(int(alive[nodes - lost]), comb(nodes, lost))


def slowest_node(tokens: npt.NDArray[np.integer], placement: Sequence[Sequence[int]]) -> float:
    """Tokens of the most loaded node over those of an even one, where replicas of an expert share its tokens evenly."""
    replicas = np.bincount([expert for node in placement for expert in node], minlength=tokens.size)
    each = tokens / np.maximum(replicas, 1)
    total = float(tokens.sum())
    return max(float(each[list(node)].sum()) for node in placement) * len(placement) / total if total else 1.0


def experts_lost(placement: Sequence[Sequence[int]], lost: Sequence[int]) -> list[int]:
    """Experts of which no replica is left without the nodes ``lost``."""
    gone = set(lost)
    left = {expert for node, its in enumerate(placement) if node not in gone for expert in its}
    return sorted({expert for its in placement for expert in its} - left)


def _groups(replicas: Replicas, nodes: int, slots: int) -> Iterator[tuple[list[int], int]]:
    """Experts of each group, and how many nodes are its own."""
    ascending = np.argsort(replicas, kind="stable")
    free = nodes
    for start in range(0, replicas.size, slots):
        group = ascending[start : start + slots].tolist()
        count = min(int(replicas[group[0]]), free)
        free -= count
        yield group, count


def _fill(placed: list[list[int]], left: Replicas, slots: int) -> None:
    """Vacant slots, one of each node at a time: the expert with the most replicas left that is not there yet."""
    while left.any():
        for node in placed:
            if len(node) < slots and left.any():
                elsewhere = left.copy()
                elsewhere[node] = 0
                expert = int((elsewhere if elsewhere.any() else left).argmax())
                node.append(expert)
                left[expert] -= 1


def _check(replicas: Replicas, nodes: int, slots: int) -> None:
    if nodes < 1 or slots < 1 or int(replicas.sum()) != nodes * slots or replicas.min() < 1:
        raise ConfigError(
            f"{replicas.tolist()} replicas on {nodes} nodes of {slots} slots; needs one of each expert at least, and "
            f"{nodes * slots} together"
        )
