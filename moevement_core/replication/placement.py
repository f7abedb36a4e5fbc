"""Placement: the peers that keep copies of each rank's snapshots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from moevement_core.errors import ConfigError
from moevement_core.util.words import counted

Placement = list[tuple[int, ...]]
"""Peers of each rank, by rank; the nearest peer is first."""


class PlacementKind(StrEnum):
    """Rule by which the peers of a rank are chosen."""

    SPREAD = "spread"
    """Rule that puts every copy on another node.

    All ranks keep the same number of copies if all nodes have the same number of ranks.
    """
    REDUNDANCY = "redundancy"
    """Rule of MoEtion's Algorithm 2: it prefers ranks that keep few copies; of these, data-parallel peers."""
    GROUPS = "groups"
    """Rule of GEMINI (SOSP '23, Algorithm 1): the nodes of a group keep each other's copies.

    A group has r + 1 nodes, for r copies. If the number of nodes is a multiple of r + 1, no placement is better: when
    r + 1 random nodes fail at once, no other placement is more likely to keep a copy of everything. Otherwise the nodes
    left over form a ring with the last group. The copies of a node of the ring are on the next r nodes of the ring.
    """


WANTED = 2
"""Copies of each snapshot that a job makes by default, if it has enough nodes."""


@dataclass(frozen=True)
class Copies:
    """Copies of each snapshot: their number, and where they may be."""

    replicas: int
    same_node: bool
    """True if copies may be on the rank's own node, where they survive the loss of a process, but not of the node."""
    warning: str | None = None
    """Warning for users if there are fewer copies than wanted, or no copies on other nodes; None otherwise."""


def allowed_copies(nodes: Sequence[Hashable], replicas: int | None, *, same_node: bool, is_running: bool) -> Copies:
    """Return how many copies of each snapshot a job makes on its nodes, and where they may be.

    Args:
        nodes: node of each rank.
        replicas: number of copies that the user's flags set. None for :data:`WANTED`, or fewer if there are too few
            nodes.
        same_node: True if copies may be on the rank's own node.
        is_running: True if the job has begun. A running job continues with the copies that the remaining nodes allow.
    """
    ranks, others = len(nodes), len(set(nodes)) - 1
    if replicas is not None and not (is_running and replicas > (ranks - 1 if same_node else others)):
        return Copies(replicas, same_node)
    if is_running and ranks == 1:
        return Copies(0, True, "only one rank is left, so no other rank can keep copies of its snapshots")
    wanted = WANTED if replicas is None else replicas
    if others and not same_node:
        possible = min(wanted, others)
        few = f"each snapshot has {possible} of {wanted} copies; the job has only {counted(others, 'other node')}"
        return Copies(possible, False, few if possible < wanted else None)
    possible = min(wanted, ranks - 1)
    if others or not possible:
        return Copies(possible, True)
    copies = counted(possible, "copy", "copies")
    warning = (
        f"all {ranks} ranks are on one node, which also holds the {copies} of each snapshot; the job survives the loss "
        "of a process, but not the loss of the node"
    )
    return Copies(possible, True, warning)


def place(
    nodes: Sequence[Hashable],
    replicas: int,
    kind: PlacementKind = PlacementKind.SPREAD,
    groups: Sequence[Sequence[int]] = (),
    *,
    same_node: bool = False,
    before: Sequence[Sequence[int]] = (),
) -> Placement:
    """Return the peers of every rank.

    Args:
        nodes: node of each rank.
        replicas: r, number of copies of each snapshot.
        kind: rule that chooses the peers.
        groups: ranks that hold the same state (data-parallel peers); only for ``redundancy``.
        same_node: True if copies may be on the rank's own node, where they survive the loss of a process only.
        before: peers of every rank until now. Peers that still fit stay, so that ranks need not send copies again.

    Raises:
        ConfigError: there are fewer other nodes, or other ranks, than copies.
    """
    ranks, node_count = len(nodes), len(set(nodes))
    if replicas < 0:
        raise ConfigError(f"{replicas} replicas are impossible; the number must be 0 or more")
    if replicas == 0:
        return [()] * ranks
    if replicas >= ranks:
        raise ConfigError(f"{replicas} replicas among {ranks} ranks; needs more ranks than replicas")
    if not same_node and replicas >= node_count:
        raise ConfigError(
            f"{replicas} replicas on other nodes, but the number of other nodes is {node_count - 1}; needs {replicas} "
            f"or more. Give --moevement-replicas {node_count - 1} or less, or allow copies on the rank's own node with "
            "--moevement-replicas-on-same-node"
        )
    if same_node and 1 < node_count <= replicas:
        return _at_home_too(nodes, replicas, kind=kind, groups=groups, before=before)
    home = list(range(ranks)) if replicas >= node_count else list(nodes)
    if before:
        is_spread = len(set(home)) > replicas
        kept = [_that_will_do(rank, peers, home, replicas, is_spread=is_spread) for rank, peers in enumerate(before)]
        return _near_redundancy(home, replicas, groups if kind is PlacementKind.REDUNDANCY else (), kept)
    if kind is PlacementKind.REDUNDANCY:
        return _near_redundancy(home, replicas, groups)
    if kind is PlacementKind.GROUPS:
        return _in_groups(home, replicas)
    return _spread(home, replicas)


def _at_home_too(
    nodes: Sequence[Hashable],
    replicas: int,
    kind: PlacementKind,
    groups: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
) -> Placement:
    """Place one copy of a rank's snapshots on each other node, and the remaining copies on any other ranks."""
    away = place(nodes, len(set(nodes)) - 1, kind, groups, before=before)
    had = before or [()] * len(nodes)
    kept = [
        (*peers_away, *(peer for peer in had[rank] if peer < len(nodes) and peer not in (*peers_away, rank)))[:replicas]
        for rank, peers_away in enumerate(away)
    ]
    return _near_redundancy(range(len(nodes)), replicas, (), kept)


def _that_will_do(
    rank: int, peers: Sequence[int], nodes: Sequence[Hashable], replicas: int, *, is_spread: bool
) -> tuple[int, ...]:
    """Return the former peers of ``rank`` that may stay its peers.

    All of them are on other nodes than the rank. If ``is_spread``, no two of them are on the same node.
    """
    others = [peer for peer in peers if peer < len(nodes) and nodes[peer] != nodes[rank]]
    if is_spread:
        others = list({nodes[peer]: peer for peer in reversed(others)}.values())
    return tuple(peer for peer in peers if peer in others)[:replicas]


def _spread(nodes: Sequence[Hashable], replicas: int) -> Placement:
    """Choose the peers for one copy of every rank at a time: each rank's peer is a fixed number of nodes further on.

    Such a shift by whole nodes is a permutation of the ranks, so every rank keeps exactly ``replicas`` copies.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    order = [rank for ranks in members.values() for rank in ranks]
    widest = max(len(ranks) for ranks in members.values())
    if (replicas + 1) * widest > len(order):  # the nodes are too unequal for shifts
        return _near_redundancy(nodes, replicas, ())
    peers: Placement = [()] * len(order)
    for position, rank in enumerate(order):
        peers[rank] = tuple(order[(position + shift * widest) % len(order)] for shift in range(1, replicas + 1))
    return peers


def _in_groups(nodes: Sequence[Hashable], replicas: int) -> Placement:
    """Choose as peers the ranks with the same local position on the nodes that :func:`peer_nodes` returns."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    here = list(members.values())
    peers: Placement = [()] * len(nodes)
    for index, others in enumerate(peer_nodes(len(here), replicas)):
        for place_, rank in enumerate(here[index]):
            peers[rank] = tuple(here[other][place_ % len(here[other])] for other in others)
    return peers


def peer_nodes(nodes: int, replicas: int) -> list[tuple[int, ...]]:
    """Return for each node the nodes that keep its copies, by :attr:`PlacementKind.GROUPS`.

    These are the other nodes of its group. If the number of nodes is no multiple of r + 1, the last group and the nodes
    left over form a ring. The copies of a node of the ring are on the next r nodes of the ring.

    Args:
        nodes: number of nodes, more than ``replicas``.
        replicas: r; a group has r + 1 nodes.
    """
    size = replicas + 1
    grouped = nodes if nodes % size == 0 else (nodes // size - 1) * size
    peers = []
    for node in range(grouped):
        first = node - node % size
        peers.append(tuple(first + (node - first + step) % size for step in range(1, size)))
    ring = nodes - grouped
    peers += [tuple(grouped + (node + step) % ring for step in range(1, size)) for node in range(ring)]
    return peers


def _near_redundancy(
    nodes: Sequence[Hashable],
    replicas: int,
    groups: Sequence[Sequence[int]],
    kept: Sequence[Sequence[int]] = (),
) -> Placement:
    """Choose the peers of one rank after the other, in the order of preference that :class:`_Choice` defines.

    All peers are on other nodes than the rank whose copies they keep.
    """
    choice = _Choice(nodes, replicas, groups, Counter(peer for peers in kept for peer in peers))
    placement: Placement = []
    for rank in range(len(nodes)):
        chosen = list(kept[rank]) if kept else []
        while len(chosen) < replicas:
            chosen.append(choice.next_peer(rank, chosen))
        placement.append(tuple(chosen))
    return placement


class _Choice:
    """Choice of the best next peer of a rank. The time of a choice usually does not grow with the number of ranks.

    The conditions below compare two possible peers, in order. The first condition that only one of them meets decides:

    - The peer keeps fewer than ``replicas`` copies.
    - The peer's node has no copy of this rank.
    - The peer is in the rank's group.
    - The peer keeps fewer copies than the other peer.
    - The peer's number follows the rank's number more closely.
    """

    def __init__(
        self, nodes: Sequence[Hashable], replicas: int, groups: Sequence[Sequence[int]], load: Counter[int]
    ) -> None:
        self._nodes, self._replicas, self._load = nodes, replicas, load
        self._group_of = {rank: group for group in groups for rank in group}
        self._by_load = [
            [rank for rank in range(len(nodes)) if load[rank] == copies] for copies in range(replicas)
        ]  # fmt: skip
        """Ranks that keep a given number of copies, ascending, for each number below ``replicas``."""

    def next_peer(self, rank: int, chosen: Sequence[int]) -> int:
        """Return the best peer of ``rank`` that is not among ``chosen``, and count one more copy on this peer."""
        used = {self._nodes[rank], *(self._nodes[peer] for peer in chosen)}
        best = self._of_group(rank, used)
        if best is None:
            best = next(self._least_loaded(rank, used), None)
        if best is None:
            best = self._of_all(rank, chosen, used)
        if (copies := self._load[best]) < self._replicas:
            ranks = self._by_load[copies]
            del ranks[bisect_left(ranks, best)]
            if copies + 1 < self._replicas:
                insort(self._by_load[copies + 1], best)
        self._load[best] += 1
        return best

    def _distance(self, rank: int, peer: int) -> int:
        return (peer - rank) % len(self._nodes)

    def _of_group(self, rank: int, used: set[Hashable]) -> int | None:
        """Return the best ideal peer in the rank's group; None if there is none.

        An ideal peer keeps fewer than ``replicas`` copies, and its node has no copy of this rank.
        """
        free = [
            peer
            for peer in self._group_of.get(rank, ())
            if self._load[peer] < self._replicas and self._nodes[peer] not in used
        ]
        return min(free, key=lambda peer: (self._load[peer], self._distance(rank, peer)), default=None)

    def _least_loaded(self, rank: int, used: set[Hashable]) -> Iterator[int]:
        """Yield all ideal peers, as :meth:`_of_group` defines them, the best first."""
        for ranks in self._by_load:
            after = bisect_left(ranks, rank)
            for index in range(len(ranks)):
                peer = ranks[(after + index) % len(ranks)]
                if self._nodes[peer] not in used:
                    yield peer

    def _of_all(self, rank: int, chosen: Sequence[int], used: set[Hashable]) -> int:
        """Return the best peer for a rank for which no peer is ideal.

        An ideal peer keeps fewer than ``replicas`` copies, on a node that has no copy of this rank yet.
        """
        group = set(self._group_of.get(rank, ()))
        return min(
            (peer for peer in range(len(self._nodes)) if self._nodes[peer] != self._nodes[rank] and peer not in chosen),
            key=lambda peer: (
                self._load[peer] >= self._replicas,
                self._nodes[peer] in used,
                peer not in group,
                self._load[peer],
                self._distance(rank, peer),
            ),
        )


def sources_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """Return the ranks whose copies ``rank`` keeps."""
    return tuple(source for source, peers in enumerate(placement) if rank in peers)


def all_sources(placement: Sequence[Sequence[int]], ranks: int) -> list[tuple[int, ...]]:
    """Return the result of :func:`sources_of` for every rank, in time linear in the number of copies."""
    sources: list[list[int]] = [[] for _ in range(ranks)]
    for source, peers in enumerate(placement):
        for peer in peers:
            if peer < ranks:
                sources[peer].append(source)
    return [tuple(of_rank) for of_rank in sources]
