"""Placement of expert replicas on nodes by maximum rank overlap: it survives the most failures (Lazarus, theorem 1).

A node has as many slots as its ranks have together, so nodes may differ. Experts are sorted by their number of replicas
and cut into groups. A group has as many experts as a node has slots. Its expert with the fewest replicas decides how
many nodes the group gets: as many as this expert has replicas. Each of these nodes holds all experts of the group, and
no other group gets the node. So a group is lost only if all its nodes fail. The remaining replicas fill the vacant
slots.

The theorem says that no placement survives more failures. It holds if all nodes have equally many slots, and if enough
nodes remain for the last group. If too few remain, several replicas of an expert share a node. Then another placement
may survive more failures, and the loss of fewer nodes than an expert has replicas may lose the expert. :func:`place`
checks for this case, and tests have small examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import comb

import numpy as np
import numpy.typing as npt

from moevement_core.elastic.allocation import Replicas
from moevement_core.errors import ConfigError

Placement = tuple[tuple[int, ...], ...]
"""Experts in the slots of each node, in ascending order; an expert may be in several slots of a node."""


def maximum_rank_overlap(replicas: Replicas, slots: Sequence[int]) -> Placement:
    """Return the placement by maximum rank overlap, as Lazarus defines it.

    Nodes with more slots come first, so experts with few replicas get large nodes.

    Args:
        replicas: replicas of each expert, int64 ``[E]``; their sum equals the sum of ``slots``.
        slots: slots of each node, ``[N]``.

    Raises:
        ConfigError: replicas do not fill the slots, or an expert has no replica.
    """
    _check(replicas, slots)
    left = replicas.copy()
    placed: list[list[int]] = [[] for _ in slots]
    for group, nodes in _groups(replicas, slots):
        for node in nodes:
            placed[node].extend(group)
        left[group] -= len(nodes)
    _fill(placed, left, slots)
    return tuple(tuple(sorted(node)) for node in placed)


def place(replicas: Replicas, slots: Sequence[int], floor: int, ranks: Sequence[int] | None = None) -> Placement:
    """Return a placement that survives the loss of any ``floor - 1`` nodes, if there is such a placement.

    The function returns Lazarus's placement (:func:`maximum_rank_overlap`) if it survives this loss, else a placement
    by round robin (:func:`spread`). If no placement survives it, the result survives the loss of as many nodes as
    possible.

    Args:
        replicas: replicas of each expert, int64 ``[E]``; their sum equals the sum of ``slots``.
        slots: slots of each node, ``[N]``.
        floor: f, least number of nodes that should hold each expert.
        ranks: number of ranks on each node, ``[N]``. If the slots do not allow f nodes for each expert, the
            function prefers a placement with f ranks for each expert. None if only nodes matter.

    Raises:
        ConfigError: replicas do not fill the slots, or an expert has no replica.
    """
    _check(replicas, slots)
    # A second replica on the same node does not help, so a node with s slots counts with min(s, E) of them. E experts
    # on f nodes each need f * E such slots.
    useful = sum(min(node, replicas.size) for node in slots)
    needed = min(floor, int(replicas.min()), useful // replicas.size)
    on_ranks = min(floor, int(replicas.min()))
    fallback: Placement | None = None
    for placer in (
        lambda: maximum_rank_overlap(replicas, slots),
        lambda: spread(replicas, slots),
        lambda: spread(replicas, slots, most=needed),
    ):
        placement = placer()
        if min(nodes_by_expert(placement).values()) >= needed:
            if needed == on_ranks or ranks is None or _fewest_ranks(placement, ranks) >= on_ranks:
                return placement
            fallback = fallback or placement
    assert fallback is not None  # the last placement reaches the bound
    return fallback


def _fewest_ranks(placement: Placement, ranks: Sequence[int]) -> int:
    """Count for each expert the ranks that can hold a replica of it, and return the smallest count.

    The replicas of an expert on a node go to different ranks if the node has enough ranks.
    """
    held: Counter[int] = Counter()
    for experts, count in zip(placement, ranks, strict=True):
        for expert, replicas in Counter(experts).items():
            held[expert] += min(replicas, count)
    return min(held.values())


def spread(
    replicas: Replicas, slots: Sequence[int], loads: Sequence[float] | None = None, most: int | None = None
) -> Placement:
    """Return the placement by round robin, which puts the replicas of an expert on different nodes.

    Each replica goes to a node with the most vacant slots. On nodes with equally many slots, every expert gets as many
    nodes as it has replicas, or all nodes.

    Args:
        replicas: replicas of each expert, int64 ``[E]``; their sum equals the sum of ``slots``.
        slots: slots of each node, ``[N]``.
        loads: tokens of each replica, by expert, ``[E]``. Among nodes with equally many vacant slots the one with the
            fewest tokens comes first; without loads, the first one.
        most: number of replicas of each expert that are placed first, on different nodes if slots allow. Further
            replicas follow when all experts have this number. None to place all replicas of an expert first.

    Raises:
        ConfigError: replicas do not fill the slots, or an expert has no replica.
    """
    _check(replicas, slots)
    vacant = np.array(slots, dtype=np.int64)
    tokens = np.zeros(len(slots))
    placed: list[list[int]] = [[] for _ in slots]
    left = replicas.copy()
    # With loads, heavy replicas come first, because light ones that come later can even out the loads of nodes.
    order = range(replicas.size) if loads is None else np.argsort(-np.asarray(loads), kind="stable").tolist()

    def put(expert: int, count: int, candidates: npt.NDArray[np.int64]) -> None:
        chosen = candidates[np.lexsort((candidates, tokens[candidates], -vacant[candidates]))][:count]
        for node in chosen.tolist():
            placed[node].append(expert)
        vacant[chosen] -= 1
        tokens[chosen] += 0.0 if loads is None else loads[expert]
        left[expert] -= chosen.size

    for expert in order:
        put(expert, int(left[expert]) if most is None else min(most, int(left[expert])), np.flatnonzero(vacant))
    while left.any():
        for expert in order:
            without = np.array([node for node in np.flatnonzero(vacant) if expert not in placed[node]], dtype=np.int64)
            put(expert, int(left[expert]), without if without.size else np.flatnonzero(vacant))
    return tuple(tuple(sorted(node)) for node in placed)


def compact(replicas: Replicas, slots: Sequence[int]) -> Placement:
    """Return the placement that fills one node after the other in the order of experts; a baseline for comparisons."""
    _check(replicas, slots)
    every = np.repeat(np.arange(replicas.size), replicas)
    return tuple(tuple(node.tolist()) for node in np.split(every, np.cumsum(slots)[:-1]))


def survival(replicas: Replicas, nodes: int, slots: int, lost: int) -> Fraction:
    """Return the probability that every expert keeps a replica if ``lost`` random nodes fail.

    :func:`maximum_rank_overlap` places the experts on ``nodes`` nodes with ``slots`` slots each. Every expert keeps a
    replica if at least one node of each group survives.
    """
    if not 0 <= lost <= nodes:
        return Fraction(0)
    sizes = [len(group_nodes) for _, group_nodes in _groups(replicas, [slots] * nodes)]
    # ``alive[k]`` is the number of sets of k surviving nodes that contain a node of each group so far.
    alive = [comb(nodes - sum(sizes), kept) for kept in range(nodes - sum(sizes) + 1)]
    for size in sizes:
        group = [0, *(comb(size, kept) for kept in range(1, size + 1))]
        alive = np.convolve(np.array(alive, dtype=object), np.array(group, dtype=object)).tolist()
    return Fraction(int(alive[nodes - lost]), comb(nodes, lost))


def slowest_node(tokens: npt.NDArray[np.integer], placement: Sequence[Sequence[int]]) -> float:
    """Return the tokens of the most loaded node, divided by the mean over all nodes.

    The replicas of an expert share the tokens of that expert evenly.
    """
    replicas = np.bincount([expert for node in placement for expert in node], minlength=tokens.size)
    each = tokens / np.maximum(replicas, 1)
    total = float(tokens.sum())
    return max(float(each[list(node)].sum()) for node in placement) * len(placement) / total if total else 1.0


def nodes_by_expert(placement: Sequence[Sequence[int]]) -> Counter[int]:
    """Return the number of nodes that hold each expert."""
    return Counter(expert for experts in placement for expert in set(experts))


def experts_lost(placement: Sequence[Sequence[int]], lost: Sequence[int]) -> list[int]:
    """Return the experts that have no replica outside the nodes ``lost``."""
    failed = set(lost)
    left = {expert for node, experts in enumerate(placement) if node not in failed for expert in experts}
    return sorted({expert for experts in placement for expert in experts} - left)


def _groups(replicas: Replicas, slots: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the experts of each group, and the group's nodes.

    A group has as many experts as its smallest node has slots. If nodes run out, the last group has all remaining
    experts and no nodes.
    """
    ascending = np.argsort(replicas, kind="stable").tolist()
    free = sorted(range(len(slots)), key=lambda node: -slots[node])
    while ascending and free:
        nodes = free[: int(replicas[ascending[0]])]
        free = free[len(nodes) :]
        size = slots[nodes[-1]]
        yield ascending[:size], nodes
        ascending = ascending[size:]
    if ascending:
        yield ascending, []


def _fill(placed: list[list[int]], left: Replicas, slots: Sequence[int]) -> None:
    """Fill the vacant slots of the nodes ``placed`` with the replicas that ``left`` counts; both change in place.

    Each node in turn gets the expert with the most replicas left, preferably an expert that the node does not have yet.
    """
    while left.any():
        for node, size in zip(placed, slots, strict=True):
            if len(node) < size and left.any():
                elsewhere = left.copy()
                elsewhere[node] = 0
                expert = int((elsewhere if elsewhere.any() else left).argmax())
                node.append(expert)
                left[expert] -= 1


def _check(replicas: Replicas, slots: Sequence[int]) -> None:
    if not slots or min(slots) < 1 or int(replicas.sum()) != sum(slots) or replicas.min() < 1:
        sizes = ", ".join(map(str, sorted(set(slots))))
        raise ConfigError(
            f"{replicas.tolist()} replicas on {len(slots)} nodes of {sizes} slots; needs at least one replica of each "
            f"expert, and {sum(slots)} replicas in total"
        )
