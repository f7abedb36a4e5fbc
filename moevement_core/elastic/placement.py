"""Placement of expert replicas on nodes: maximum rank overlap, which survives most node failures (Lazarus, theorem 1).

Experts are sorted by their number of replicas and cut into groups. The size of a group is the number of slots of a
node. A group gets one node for each replica of the group's scarcest expert. Each of these nodes holds all experts of
the group, and no other group gets the node. So a group is lost only if all its nodes fail. The remaining replicas fill
the vacant slots.

The theorem says that no placement survives more failures. It holds if the last group gets a node for each replica of
its scarcest expert. If fewer nodes remain, several replicas of that expert share a node, and another placement may
survive more failures. In this case an expert may even be lost although fewer nodes fail than the minimum number of its
replicas. Tests have small cases of this, and :func:`place` checks for it.
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
"""Experts in the slots of each node, in ascending order; an expert may be in several slots of a node."""


def maximum_rank_overlap(replicas: Replicas, nodes: int, slots: int) -> Placement:
    """Return the placement by maximum rank overlap, as Lazarus defines it.

    Args:
        replicas: replicas of each expert, int64 ``[E]``; their sum is ``nodes * slots``.
        nodes: number of nodes, N.
        slots: slots of each node, c.

    Raises:
        ConfigError: replicas do not fill the slots, or an expert has no replica.
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
    """Return Lazarus's placement if it survives the loss of any ``floor - 1`` nodes, else the placement by round robin.

    Round robin (:func:`spread`) always survives this loss.

    Args:
        replicas: replicas of each expert, int64 ``[E]``, at least ``floor`` if slots allow; their sum is
            ``nodes * slots``.
        nodes: number of nodes, N.
        slots: slots of each node, c.
        floor: least number of replicas of each expert, f.

    Raises:
        ConfigError: replicas do not fill the slots, or an expert has no replica.
    """
    _check(replicas, nodes, slots)
    lost = min(floor, int(replicas.min()), nodes) - 1
    return (maximum_rank_overlap if survival(replicas, nodes, slots, lost) == 1 else spread)(replicas, nodes, slots)


def spread(replicas: Replicas, nodes: int, slots: int) -> Placement:
    """Return the placement by round robin, which puts the replicas of an expert on consecutive nodes."""
    _check(replicas, nodes, slots)
    every = np.repeat(np.arange(replicas.size), replicas)
    return tuple(tuple(every[node::nodes].tolist()) for node in range(nodes))


def compact(replicas: Replicas, nodes: int, slots: int) -> Placement:
    """Return the placement that fills one node after the other in order of experts, for comparisons."""
    _check(replicas, nodes, slots)
    every = np.repeat(np.arange(replicas.size), replicas)
    return tuple(tuple(every[node * slots : (node + 1) * slots].tolist()) for node in range(nodes))


def survival(replicas: Replicas, nodes: int, slots: int, lost: int) -> Fraction:
    """Return the probability that every expert keeps a replica if ``lost`` random nodes fail.

    The experts are placed by :func:`maximum_rank_overlap`. So the function counts the sets of ``lost`` nodes that leave
    at least one node of each group, and divides this number by the number of all sets of ``lost`` nodes.
    """
    if not 0 <= lost <= nodes:
        return Fraction(0)
    sizes = [count for _, count in _groups(replicas, nodes, slots)]
    # ``alive[k]`` is the number of sets of k surviving nodes that contain a node of each group so far.
    alive = [comb(nodes - sum(sizes), kept) for kept in range(nodes - sum(sizes) + 1)]
    for size in sizes:
        group = [0, *(comb(size, kept) for kept in range(1, size + 1))]
        alive = np.convolve(np.array(alive, dtype=object), np.array(group, dtype=object)).tolist()
    return Fraction(int(alive[nodes - lost]), comb(nodes, lost))


def slowest_node(tokens: npt.NDArray[np.integer], placement: Sequence[Sequence[int]]) -> float:
    """Return the tokens of the most loaded node, relative to the mean over all nodes.

    The replicas of an expert share the tokens of that expert evenly.
    """
    replicas = np.bincount([expert for node in placement for expert in node], minlength=tokens.size)
    each = tokens / np.maximum(replicas, 1)
    total = float(tokens.sum())
    return max(float(each[list(node)].sum()) for node in placement) * len(placement) / total if total else 1.0


def experts_lost(placement: Sequence[Sequence[int]], lost: Sequence[int]) -> list[int]:
    """Return the experts that have no replica outside the nodes ``lost``."""
    failed = set(lost)
    left = {expert for node, experts in enumerate(placement) if node not in failed for expert in experts}
    return sorted({expert for experts in placement for expert in experts} - left)


def _groups(replicas: Replicas, nodes: int, slots: int) -> Iterator[tuple[list[int], int]]:
    """Yield the experts of each group, and the number of its nodes."""
    ascending = np.argsort(replicas, kind="stable")
    free = nodes
    for start in range(0, replicas.size, slots):
        group = ascending[start : start + slots].tolist()
        count = min(int(replicas[group[0]]), free)
        free -= count
        yield group, count


def _fill(placed: list[list[int]], left: Replicas, slots: int) -> None:
    """Fill the vacant slots in ``placed`` with the replicas in ``left``; both change in place.

    Each node in turn gets the expert with the most replicas left, preferably an expert that the node does not have yet.
    """
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
            f"{replicas.tolist()} replicas on {nodes} nodes of {slots} slots; needs at least one replica of each "
            f"expert, and {nodes * slots} replicas in total"
        )
