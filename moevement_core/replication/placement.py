"""Which peers keep the copies of each rank's snapshots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from enum import StrEnum

from moevement_core.errors import ConfigError

Placement = list[tuple[int, ...]]
"""For each rank its peers, nearest first."""


class PlacementKind(StrEnum):
    """By what peers are chosen."""

    SPREAD = "spread"
    """Every copy on another node, every rank keeping as many copies as it makes."""
    REDUNDANCY = "redundancy"
    """MoEtion's Algorithm 2: among the ranks that hold the same state first, then elsewhere; loads kept even."""


def place(
    nodes: Sequence[Hashable],
    replicas: int,
    kind: PlacementKind = PlacementKind.SPREAD,
    groups: Sequence[Sequence[int]] = (),
    *,
    same_node: bool = False,
) -> Placement:
    """The peers of every rank.

    Args:
        nodes: the node that each rank runs on.
        replicas: r, copies of each snapshot.
        kind: by what peers are chosen.
        groups: ranks that hold the same state (data-parallel peers); only for ``redundancy``.
        same_node: whether copies may stay on the rank's own node, where they survive a process and not the node.

    Raises:
        ConfigError: fewer other nodes, or ranks, than copies.
    """
    ranks, node_count = len(nodes), len(set(nodes))
    if replicas < 0:
        raise ConfigError(f"{replicas} replicas; needs 0 or more")
    if replicas == 0:
        return [()] * ranks
    if replicas >= ranks:
        raise ConfigError(f"{replicas} replicas among {ranks} ranks; needs more ranks than replicas")
    if not same_node and replicas >= node_count:
        raise ConfigError(
            f"{replicas} replicas on other nodes, of which there are {node_count - 1}; needs at least {replicas}: ask "
            f"for at most {node_count - 1} replicas (--moevement-replicas), or let copies stay on their own node "
            "(--moevement-replicas-on-same-node)"
        )
    home = list(range(ranks)) if same_node and replicas >= node_count else list(nodes)
    if kind is PlacementKind.REDUNDANCY:
        return _near_redundancy(home, replicas, groups)
    return _spread(home, replicas)


def _spread(nodes: Sequence[Hashable], replicas: int) -> Placement:
    """Shift all ranks by whole nodes: each shift is a permutation, so every rank keeps exactly ``replicas`` copies."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    order = [rank for ranks in members.values() for rank in ranks]
    widest = max(len(ranks) for ranks in members.values())
    if (replicas + 1) * widest > len(order):  # nodes too unequal for shifts
        return _near_redundancy(nodes, replicas, ())
    peers: Placement = [()] * len(order)
    for position, rank in enumerate(order):
        peers[rank] = tuple(order[(position + shift * widest) % len(order)] for shift in range(1, replicas + 1))
    return peers


def _near_redundancy(nodes: Sequence[Hashable], replicas: int, groups: Sequence[Sequence[int]]) -> Placement:
    """For each rank in turn the least loaded ranks: of its own group first, always of other nodes, new nodes first."""
    group_of = {rank: set(group) for group in groups for rank in group}
    load = [0] * len(nodes)
    peers: Placement = []
    for rank, node in enumerate(nodes):
        chosen: list[int] = []
        while len(chosen) < replicas:
            used = {node, *(nodes[peer] for peer in chosen)}
            others = [peer for peer in range(len(nodes)) if nodes[peer] != node and peer not in chosen]
            best = min(
                others,
                key=lambda peer: (
                    load[peer] >= replicas,
                    nodes[peer] in used,
                    peer not in group_of.get(rank, ()),
                    load[peer],
                    (peer - rank) % len(nodes),
                ),
            )
            chosen.append(best)
            load[best] += 1
        peers.append(tuple(chosen))
    return peers


def sources_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """The ranks whose copies ``rank`` keeps."""
    return tuple(source for source, peers in enumerate(placement) if rank in peers)
