"""Choice of the waiting process that takes over each failed rank. The choice keeps blocks of ranks on one node.

A *block* is a group of consecutive ranks that communicate in every layer (tensor, context and expert parallelism). All
blocks have the same size, and the first rank of a block is a multiple of this size. Ranks of one node communicate over
NVLink. Between nodes, each rank has one network interface, with about a tenth of NVLink's bandwidth. All functions here
are pure.
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

    The ranks of a block communicate in every layer, so they should share a node. The function assigns ranks in this
    order:

    1. Missing ranks of a block go to the node of the block's other ranks. A block that is missing as a whole goes to
       the node where it was.
    2. Other whole blocks go to any node with enough processes.
    3. Each remaining rank goes to the node where it was or where its block is, or else to the first waiting process.

    Args:
        missing: ranks without a process; there must be a waiting process for each.
        kept: nodes of the ranks that keep their processes.
        before: nodes of all ranks when the job was last formed.
        waiting: processes without a rank; the first ones are taken first.
        block: size of a block in ranks; 1 if no ranks communicate more than others.
        avoided: nodes that may be lost or may compute wrong results; the function does not prefer such a node for the
            ranks that were on it.
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
    """Waiting processes that are still free, by node, and the assignments of processes to ranks so far."""

    def __init__(self, waiting: Sequence[MemberInfo]) -> None:
        self.taken: dict[int, int] = {}
        """Member that takes over each rank, by rank."""
        self._on: dict[str, list[tuple[int, int]]] = {}
        """Free processes by node, as pairs: position in the list of waiting processes, and member.

        The process that is first in the list of waiting processes is last here, so that ``pop`` returns it.
        """
        for place, info in reversed(list(enumerate(waiting))):
            self._on.setdefault(info.node, []).append((place, info.member))

    @property
    def nodes(self) -> list[str]:
        return [node for node, members in self._on.items() if members]

    def take_together(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Assign processes of a single node to all ``ranks``, if one of ``nodes`` has enough free processes.

        Among several such nodes, the method prefers the one whose processes come first among the waiting processes.
        """
        count = len(ranks)
        candidates = [(members[-count], node) for node in nodes if len(members := self._on.get(node, [])) >= count]
        for rank in ranks if candidates else ():
            self._take(rank, min(candidates)[1])

    def take(self, rank: int, near: Sequence[str]) -> None:
        """Assign to ``rank`` a free process on the first node of ``near`` that has one, else the first free process."""
        first = min((self._on[node][-1], node) for node in self.nodes)[1]
        self._take(rank, next((node for node in near if self._on.get(node)), first))

    def _take(self, rank: int, node: str) -> None:
        self.taken[rank] = self._on[node].pop()[1]


def split_blocks(nodes: Mapping[int, str], block: int) -> set[int]:
    """Return the numbers of the blocks whose ranks are on several nodes. Block N begins with rank ``N * block``.

    Args:
        nodes: node of each rank.
        block: size of a block in ranks.
    """
    nodes_of_block: dict[int, set[str]] = {}
    for rank, node in nodes.items():
        nodes_of_block.setdefault(rank // block, set()).add(node)
    return {number for number, block_nodes in nodes_of_block.items() if len(block_nodes) > 1}


def _ranks(number: int, block: int) -> range:
    return range(number * block, (number + 1) * block)
