"""Blocks of a job: consecutive ranks that communicate in every layer, and should each be on one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moevement_core.rendezvous.roster import BLOCKS, Roster
from moevement_core.rendezvous.takeover import split_blocks
from moevement_core.rendezvous.values import Values

MOST_REPORTED = 5
"""Largest number of split blocks for which the coordinator prints a line each; it prints only a count of the others.

A block is *split* if its ranks are on several nodes.
"""


class Blocks:
    """Blocks of one job, and what the user knows of those that are split.

    Args:
        values: values of the job.
        report: called with a line of text for the user.
    """

    def __init__(self, values: Values, report: Callable[[str], None]) -> None:
        self.size = 1
        """Number of ranks in a block."""
        self.reported: set[int] = set()
        """Numbers of the blocks that are split, and of which the user knows."""
        self.waits = False
        """True while the job waits for a process to start on a failed rank's node, although there are enough spares.

        With a spare on another node, a block would span nodes.
        """
        self._values, self._report = values, report

    def learn(self, nodes: Mapping[int, str]) -> None:
        """Choose the size of blocks when the job is first formed.

        Ranks have set the value of :data:`BLOCKS` to the sizes of their groups that communicate in every layer. The
        method takes the largest size for which at least one group is on a single node. If no size has such a group, it
        takes the smallest size, because small groups are the easiest to keep on one node.

        Args:
            nodes: node of each rank.
        """
        if (text := self._values.read(BLOCKS)) is not None:
            sizes = sorted(map(int, text.split(",")))
            fitting = [size for size in sizes if len(split_blocks(nodes, size)) * size < len(nodes)]
            self.size = max(fitting, default=sizes[0])

    def wait_for_starts(
        self, missing: Sequence[int], nodes: Mapping[int, str], before: Mapping[int, str], starts: Callable[[str], bool]
    ) -> None:
        """Decide whether the job waits for a process that a supervisor starts in place of an ended one.

        The job waits if a block that was on one node would otherwise be on several nodes.

        Args:
            missing: the failed ranks.
            nodes: node that each rank gets if the job does not wait.
            before: node of each rank when the job was last formed.
            starts: returns True for a node on which a process that may get a rank is expected to start.
        """
        new = split_blocks(nodes, self.size) - split_blocks(before, self.size)
        expected = {node for rank in missing if rank // self.size in new and starts(node := before[rank])}
        if expected and not self.waits:
            where = ", ".join(sorted(expected))
            self._report(f"waiting for a process that starts on {where}, so that groups of ranks stay on one node")
        self.waits = bool(expected)

    def newly_split(self, nodes: Mapping[int, str]) -> tuple[tuple[int, int], ...]:
        """Return the first and the last rank of each split block of which the user does not know yet.

        Args:
            nodes: node of each rank.
        """
        new = sorted(split_blocks(nodes, self.size) - self.reported)
        return tuple((number * self.size, min((number + 1) * self.size, len(nodes)) - 1) for number in new)

    def report_split(self, roster: Roster) -> None:
        """Report the blocks that a roster has split."""
        for (first, last), nodes in zip(roster.split[:MOST_REPORTED], roster.split_nodes, strict=False):
            where = ", ".join(nodes)
            self._report(f"ranks {first} to {last} communicate in every layer, but are now on several nodes: {where}")
        if more := roster.split[MOST_REPORTED:]:
            self._report(f"{len(more)} more groups of ranks that communicate in every layer are now on several nodes")
        self.reported = split_blocks(roster.nodes, self.size)
