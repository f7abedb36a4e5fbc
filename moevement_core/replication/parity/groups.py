"""Which ranks are in a group, and who keeps its parity: no node has two parts of anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moevement_core.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """Ranks of whose snapshots others keep parity."""

    members: tuple[int, ...]
    holders: tuple[int, ...]
    """Holder of the first block of parity, of the second, and so on."""
    width: int
    """Members of the widest group of the job, for which coefficients are made."""

    def place_of(self, rank: int) -> int:
        """Return the position of a member."""
        return self.members.index(rank)

    @property
    def size(self) -> tuple[int, int]:
        """Members, and blocks of parity, that coefficients are made for."""
        return self.width, len(self.holders)


Groups = tuple[Group, ...]


def make_groups(nodes: Sequence[Hashable], members: int, parities: int) -> Groups:
    """Groups of ranks in the same place on different nodes, and holders on others, each with as much as the others.

    Args:
        nodes: the node that each rank runs on.
        members: G, of a group at most.
        parities: M, nodes that may be lost of any group.

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
            f"--moevement-protection parity:{members}+{parities} on {len(here)} nodes; needs {members + parities}, or "
            f"{fits}"
        )
    count = -(-len(here) // members)
    bounds = [len(here) * number // count for number in range(count + 1)]
    load = [0] * len(here)
    groups = []
    for place in range(max(map(len, here))):
        for first, last in pairwise(bounds):
            # Where nodes do not divide evenly, the narrow group goes round, and so do those who can hold for the wide.
            inside = [(node + place) % len(here) for node in range(first, last)]
            group_ranks = tuple(here[node][place] for node in inside if place < len(here[node]))
            if not group_ranks:
                continue
            others = [(node + place) % len(here) for node in range(last, first + len(here))]
            chosen = sorted(others, key=lambda node: load[node])[:parities]
            for node in chosen:
                load[node] += 1
            holders = tuple(here[node][place % len(here[node])] for node in chosen)
            groups.append(Group(group_ranks, holders, members))
    return tuple(groups)


WIDEST = 8
"""Members of a group that is proposed."""


def still_do(groups: Groups, nodes: Sequence[Hashable], members: int, parities: int) -> bool:
    """Return whether every rank is in a group and no node has two parts of one, now that ranks are on ``nodes``."""
    if any(group.size != (members, parities) for group in groups):
        return False
    everyone = sorted(rank for group in groups for rank in group.members)
    if everyone != list(range(len(nodes))):
        return False
    parts = ([nodes[rank] for rank in (*group.members, *group.holders)] for group in groups)
    return all(len(set(ranks)) == len(ranks) for ranks in parts)


def narrowed(nodes: Sequence[Hashable], members: int, parities: int) -> tuple[int, int]:
    """The nearest to ``members`` and ``parities`` that a running job's nodes allow; no members: nothing."""
    count = len(set(nodes))
    parities = min(parities, count - 1)
    return (min(members, count - parities), parities) if parities else (0, 0)
