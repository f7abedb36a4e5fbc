"""Planned moves: ranks leave a node or a process at a boundary between iterations, before anything has failed.

The user names a node or a rank. The coordinator waits until there are spares elsewhere. Then it gives each rank that
has to leave the same boundary, which no rank has reached yet. At this boundary, a leaving rank hands its whole state to
a peer, gives its rank back, and a spare takes over with that state. So no iteration is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moevement_core.rendezvous.roster import MemberInfo, Roster

AHEAD = 2
"""Number of iterations from the newest committed one to the boundary at which ranks leave.

All ranks are within one iteration of each other, and the request takes a renewal of the lease to arrive. A rank that
learns of the boundary after it has passed it leaves at its next one; then the job forms twice.
"""


class Drains:
    """Requests to drain nodes and ranks, and the members that have to leave because of them.

    Args:
        report: called with a line of text for the user.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.nodes: dict[str, str] = {}
        """Nodes to drain, each with the reason. No process on such a node gets a rank."""
        self.leaves: dict[int, int] = {}
        """Members that have to leave, each with the iteration after which it leaves."""
        self.done: set[str] = set()
        """Ranks, as text, that were asked for and have left; the caller forgets these requests."""
        self._report = report
        self._members: dict[int, tuple[str, str]] = {}
        """Members that were asked to leave by the number of their rank: that number as text, and the reason."""
        self._asked: dict[str, str] = {}
        self._said = ""

    @property
    def wants(self) -> bool:
        """True if some rank or node is drained."""
        return bool(self.nodes or self._members)

    def ask(self, asked: Mapping[str, str], roster: Roster, members: Mapping[int, MemberInfo]) -> None:
        """Take in the requests that stand now.

        Args:
            asked: reason of each request, by its target: the name of a node, or the number of a rank as text. A target
                that is missing here is no longer drained.
            roster: newest roster.
            members: members that live.
        """
        if asked == self._asked:
            return
        for target in asked.keys() - self._asked.keys():
            self._begin(target, asked[target], roster, members)
        for target in self._asked.keys() - asked.keys():
            self._cancel(target)
        self._asked = dict(asked)
        self.leaves = {
            member: at for member, at in self.leaves.items() if member in members and self.reason_of(members[member])
        }

    def _begin(self, target: str, reason: str, roster: Roster, members: Mapping[int, MemberInfo]) -> None:
        if any(info.node == target for info in members.values()):
            self.nodes[target] = reason
            self._report(f"node {target} is drained ({reason}); its ranks move to spares of other nodes")
        elif target.isdecimal() and (member := roster.ranks.get(int(target))) is not None:
            self._members[member] = target, reason
            self._report(f"rank {target} is drained ({reason}); it moves to a spare")
        else:
            self._report(f"drain {target}: the job has no such node or rank; ranks.json lists both")
            self.done.add(target)

    def _cancel(self, target: str) -> None:
        kept = [member for member, (rank, _) in self._members.items() if rank == target]
        for member in kept:
            del self._members[member]
        if self.nodes.pop(target, None) is not None:
            self._report(f"node {target} is not drained any more; its processes are spares")
        elif kept:
            self._report(f"rank {target} is not drained any more")

    def reason_of(self, info: MemberInfo) -> str:
        """Return the reason for which a member has to leave; empty if it need not leave."""
        return self._members.get(info.member, ("", self.nodes.get(info.node, "")))[1]

    def left(self, member: int) -> None:
        """Note that a member has left its rank, or has died."""
        self.leaves.pop(member, None)
        if (asked := self._members.pop(member, None)) is not None:
            self.done.add(asked[0])

    def look(
        self, roster: Roster, members: Mapping[int, MemberInfo], committed: int, spares: int, *, is_elastic: bool
    ) -> None:
        """Decide which members leave, and when; called while the job trains.

        Args:
            roster: roster of the ranks that train.
            members: members that live.
            committed: newest iteration that a rank has committed; -1 for none.
            spares: number of members that can take a rank, without those of drained nodes.
            is_elastic: True if the job can go on with fewer ranks.
        """
        leaving = {
            member: rank for rank, member in roster.ranks.items()
            if member in members and self.reason_of(members[member])
        }  # fmt: skip
        self.leaves = {member: at for member, at in self.leaves.items() if member in leaving}
        if not leaving or committed < 0 or leaving.keys() <= self.leaves.keys():
            return
        if len(leaving) > spares and not is_elastic:
            self._say(
                f"the drain waits for spares outside of drained nodes: needs {len(leaving)}, has {spares}; start "
                "processes on other nodes, or take the drain back"
            )
            return
        self._said = ""
        at = max([committed + AHEAD, *self.leaves.values()])
        self.leaves |= {member: at for member in leaving if member not in self.leaves}

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._report(text)
