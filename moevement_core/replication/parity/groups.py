"""Groups of ranks (their members), and the ranks that hold the blocks of each group's parity.

A node has at most one member or block of a group, so the loss of a node costs the group only one of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from moevement_core.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """Group of ranks whose snapshots are protected by parity on other ranks."""

    members: tuple[int, ...]
    holders: tuple[int, ...]
    """Rank that holds each block of parity, in the order of the blocks."""
    width: int
    """Most members that a group of the job may have. All groups use the coefficients for this number of members."""

    def place_of(self, rank: int) -> int:
        """Return the position of ``rank`` among the members."""
        return self.members.index(rank)

    @property
    def size(self) -> tuple[int, int]:
        """Number of members and number of blocks of parity that determine the coefficients of the group's sums."""
        return self.width, len(self.holders)


Groups = tuple[Group, ...]


def make_groups(nodes: Sequence[Hashable], members: int, parities: int) -> Groups:
    """Return groups of ranks on different nodes, and the holders of each group's parity on other nodes.

    The members of a group have the same local position on their nodes. All nodes hold about equally many blocks.

    Args:
        nodes: node of each rank.
        members: G, most members of a group.
        parities: M, number of blocks of parity of a group. The group survives the loss of any M of its nodes.

    Raises:
        ConfigError: there are too few nodes.
    """
    ranks: dict[Hashable, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks[node].append(rank)
    here = list(ranks.values())
    if len(here) < members + parities:
        fits = f"parity:{len(here) - parities}+{parities}" if len(here) > parities else "copies"
        raise ConfigError(
            f"--moevement-protection parity:{members}+{parities} on {len(here)} nodes; needs {members + parities} "
            f"nodes, so add nodes or use {fits}"
        )
    count = -(-len(here) // members)
    bounds = [len(here) * number // count for number in range(count + 1)]
    load = _Load(len(here))
    groups = []
    for place in range(max(map(len, here))):
        for first, last in pairwise(bounds):
            # For each next local position, all groups shift by one node. If some groups are smaller than others, the
            # shift spreads their members, and the holders of the larger groups' parity, over all nodes.
            inside = [(node + place) % len(here) for node in range(first, last)]
            group_ranks = tuple(here[node][place] for node in inside if place < len(here[node]))
            if not group_ranks:
                continue
            chosen = load.take(parities, (last + place) % len(here), but=inside)
            holders = tuple(here[node][place % len(here[node])] for node in chosen)
            groups.append(Group(group_ranks, holders, members))
    return tuple(groups)


class _Load:
    """Number of parity blocks on each node, kept so that a search for the least loaded nodes looks at few of them."""

    def __init__(self, nodes: int) -> None:
        self._nodes: dict[int, list[int]] = {0: list(range(nodes))}
        """Nodes in ascending order, by number of blocks."""

    def take(self, count: int, first: int, but: Collection[int]) -> list[int]:
        """Add a block to the ``count`` nodes that have the fewest; among equals, to the next ones from ``first`` on.

        Args:
            count: number of nodes.
            first: node at which the search begins; it goes on cyclically.
            but: nodes to leave out.

        Returns:
            The nodes, the one with the fewest blocks first.
        """
        chosen: list[tuple[int, int]] = []
        for blocks, nodes in sorted(self._nodes.items()):
            begin = bisect_left(nodes, first)
            around = (nodes[(begin + step) % len(nodes)] for step in range(len(nodes)))
            others = (node for node in around if node not in but)
            chosen += [(blocks, node) for node in islice(others, count - len(chosen))]
        for blocks, node in chosen:
            nodes = self._nodes[blocks]
            del nodes[bisect_left(nodes, node)]
            insort(self._nodes.setdefault(blocks + 1, []), node)
        return [node for _, node in chosen]


WIDEST = 8
"""Most members of a group that an error message proposes when it says that host memory is too small for copies."""


def groups_still_fit(groups: Groups, nodes: Sequence[Hashable], members: int, parities: int) -> bool:
    """Return True if the job can keep its groups, although ranks may have moved to other nodes.

    Every rank must be in a group, and a node may have only one member or block of each group.

    Args:
        groups: groups until now.
        nodes: node of each rank now.
        members: wanted number of members of a group.
        parities: wanted number of blocks of parity of a group.
    """
    if any(group.size != (members, parities) for group in groups):
        return False
    everyone = sorted(rank for group in groups for rank in group.members)
    if everyone != list(range(len(nodes))):
        return False
    parts = ([nodes[rank] for rank in (*group.members, *group.holders)] for group in groups)
    return all(len(set(ranks)) == len(ranks) for ranks in parts)


def narrowed(nodes: Sequence[Hashable], members: int, parities: int) -> tuple[int, int]:
    """Return how many members and blocks a group can have on the nodes that a running job has left.

    The numbers are as close to the wanted ones as possible. Both are 0 if only one node is left.

    Args:
        nodes: node of each rank now.
        members: wanted number of members of a group.
        parities: wanted number of blocks of parity of a group.
    """
    count = len(set(nodes))
    parities = min(parities, count - 1)
    return (min(members, count - parities), parities) if parities else (0, 0)
