"""Which waiting process takes over which rank, so that ranks that communicate in every layer stay on one node.

Such ranks (tensor, context and expert parallel) are consecutive: a *block* is so many ranks, from a multiple of that
on. Inside a node they communicate over NVLink, between nodes over one network interface each, a tenth of it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moevement_core.rendezvous.roster import MemberInfo


def take_over(
    missing: Sequence[int],
    kept: Mapping[int, str],
    before: Mapping[int, str],
    waiting: Sequence[MemberInfo],
    block: int,
    avoided: Collection[str] = (),
) -> dict[int, int]:
    """Return the member that takes over each missing rank.

    First, what is missing of a block goes to the node of the rest of it, and a block that is missing as a whole to the
    node where it was. Then other whole blocks go to any node with enough processes. What is left goes where each rank
    was, or to whoever came first.

    Args:
        missing: ranks without a process, not more than ``waiting``.
        kept: nodes of the ranks that keep their processes.
        before: nodes of all ranks when the job was last formed.
        waiting: processes without a rank, those to be taken first at the beginning.
        block: size of a block in ranks; 1 where no ranks communicate more than others.
        avoided: nodes that are no reason to take a process, because of what became of others there.
    """
    free = _Free(waiting)
    blocks: dict[int, list[int]] = {}
    for rank in missing:
        blocks.setdefault(rank // block, []).append(rank)
    rest = {number: {kept[rank] for rank in _ranks(number, block) if rank in kept} for number in blocks}
    for number in sorted(blocks, key=lambda number: not rest[number]):
        home = rest[number] or {before[rank] for rank in blocks[number]}
        if len(home) == 1 and not home & set(avoided):
            free.take_together(blocks[number], [*home])
    for number, ranks in blocks.items():
        if not rest[number] and ranks[0] not in free.taken:
            free.take_together(ranks, free.nodes)
    for rank in sorted(set(missing) - free.taken.keys()):
        near = [before[rank], *sorted(rest[rank // block])]
        free.take(rank, [node for node in near if node not in avoided])
    return free.taken


class _Free:
    """Processes that wait, and what they take over."""

    def __init__(self, waiting: Sequence[MemberInfo]) -> None:
        self.taken: dict[int, int] = {}
        """Members by the ranks that they take over."""
        self._on: dict[str, list[tuple[int, int]]] = {}
        """Place in the order, and member, of those on each node; the first one stands at the end."""
        for place, info in reversed(list(enumerate(waiting))):
            self._on.setdefault(info.node, []).append((place, info.member))

    @property
    def nodes(self) -> list[str]:
        return [node for node, members in self._on.items() if members]

    def take_together(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Take processes of one node for all of these ranks; of several that have enough, where they come first."""
        count = len(ranks)
        roomy = [(members[-count], node) for node in nodes if len(members := self._on.get(node, [])) >= count]
        for rank in ranks if roomy else ():
            self._take(rank, min(roomy)[1])

    def take(self, rank: int, near: Sequence[str]) -> None:
        """Take a process of the first of these nodes that has any, else the first of all."""
        first = min((self._on[node][-1], node) for node in self.nodes)[1]
        self._take(rank, next((node for node in near if self._on.get(node)), first))

    def _take(self, rank: int, node: str) -> None:
        self.taken[rank] = self._on[node].pop()[1]


def split_blocks(nodes: Mapping[int, str], block: int) -> set[int]:
    """Return the numbers of the blocks whose ranks are on more than one node.

    Args:
        nodes: by rank.
        block: size of a block in ranks.
    """
    found: dict[int, set[str]] = {}
    for rank, node in nodes.items():
        found.setdefault(rank // block, set()).add(node)
    return {number for number, its in found.items() if len(its) > 1}


def _ranks(number: int, block: int) -> range:
    return range(number * block, (number + 1) * block)
