"""Planned moves: ranks leave a node or a process at a boundary between iterations, before anything has failed.

The user names a node or a rank. The coordinator waits until there are spares elsewhere. Then it gives each rank that
has to leave the same boundary, which no rank has reached yet. At this boundary, a leaving rank hands its whole state to
a peer, gives its rank back, and a spare takes over with that state. So no iteration is repeated.

A peer that leaves at the same boundary would take the state with it. So the ranks of one node leave at a time, and
ranks whose peers are all on their own node leave one after the other (:attr:`Leave.turn`).

A rank that has handed over its state stays alive until all ranks that leave with it have done the same. Only then does
the coordinator interrupt the job, so that it forms once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from moevement_core.rendezvous.notices import NodeNotices
from moevement_core.rendezvous.roster import MemberInfo, Roster
from moevement_core.run.drain_requests import DrainRequest

AHEAD = 2
"""Least number of iterations from the newest committed one to the boundary at which ranks leave.

All ranks are within one iteration of each other. The iterations that ranks execute until they learn of the boundary
are added. A rank that learns of it after it has passed it leaves at its next one; then the job forms twice.
"""
BEATS_TO_HEAR = 3
"""Number of renewals of a lease within which all supervisors have learned of a decision."""
HAND_OVER_LEASES = 3
"""Number of lease times for the copy of a rank's state and its way to a peer together.

The other ranks wait meanwhile, and count as hung after six lease times.
"""
ARRIVE_S = 2.0
"""Seconds for which ranks that have given their rank back wait for one that has not reached the boundary yet."""
RANK = "rank:"
"""Prefix of the target of a request to drain a rank, for jobs whose nodes have numbers as names."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Boundary at which a member gives its rank back."""

    after: int
    """Iteration after which the member leaves."""
    turn: int
    """Number of members of the same node that are to leave before this one if they have no peer on another node."""


class Departure(StrEnum):
    """Report of a member that has reached the boundary at which it was asked to leave."""

    HANDS_OVER = "hands over"
    """The member copies its state and sends it to a peer."""
    STAYS = "stays"
    """The member trains on, because its peers may leave at this boundary (:attr:`Leave.turn`)."""
    GIVES_BACK = "gives back"
    """The member has handed over its state, and waits until the generation is interrupted."""


class CommitPace:
    """Pace at which a job commits iterations since it was formed."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._newest = -1

    def committed(self, iteration: int, now: float) -> None:
        """Note that a rank has committed ``iteration``; ``now`` is the value of a monotonic clock in seconds."""
        if self._first is None:
            self._first = iteration, now
        self._newest = max(self._newest, iteration)

    def per_s(self, now: float) -> float:
        """Return the iterations per second; 0.0 before two iterations were committed since the job was formed."""
        if self._first is None or now <= self._first[1]:
            return 0.0
        return (self._newest - self._first[0]) / (now - self._first[1])


class Drains:
    """Requests to drain nodes and ranks, and the members that have to leave because of them.

    Args:
        report: called with a line of text for the user.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.nodes: dict[str, str] = {}
        """Nodes to drain, each with the reason. No process on such a node gets a rank."""
        self.leaves: dict[int, Leave] = {}
        """Members that have to leave now."""
        self.notices = NodeNotices()
        self.pace = CommitPace()
        self.is_over = False
        """True once the job is to end at the next boundary: nobody moves, and processes of all nodes may take ranks."""
        self.has_no_other = False
        """True if processes of drained nodes may take ranks, because no other spare came in time."""
        self._report = report
        self._requests: dict[str, DrainRequest] = {}
        """Requests of the user, as :meth:`request` gets them."""
        self._done: set[str] = set()
        """Targets of requests that are carried out, or cannot be."""
        self._members: dict[int, tuple[str, str]] = {}
        """Members that have to leave a rank that was named: the target of the request, and its reason."""
        self._asked: dict[str, DrainRequest] = {}
        self._said = ""
        self._arrived: dict[int, float] = {}
        """Members that hand over their state at the boundary, each with the time since which they do."""
        self._stay: set[int] = set()
        """Members that have passed the boundary on purpose, and leave after the next forming of the job."""
        self._given_back: dict[int, float] = {}
        """Members that have given their rank back and wait for the others, each with the time since which they do."""

    @property
    def barred_nodes(self) -> set[str]:
        """Nodes whose processes get no rank."""
        return set() if self.is_over or self.has_no_other else set(self.nodes)

    def request(self, asked: Mapping[str, DrainRequest]) -> set[str]:
        """Take in the requests of the user that stand now; return those targets that the caller has to remove.

        The request for such a target is carried out, or cannot be.

        Args:
            asked: requests by target: the name of a node, or the number of a rank, with or without :data:`RANK`. A
                target that is missing here is no longer drained.
        """
        self._requests = dict(asked)
        done, self._done = self._done, set()
        return done

    def update(self, roster: Roster, members: Mapping[int, MemberInfo]) -> None:
        """Begin or end to drain what requests of the user and notices of supervisors name now.

        Args:
            roster: newest roster.
            members: members that live.
        """
        asked = self.notices.requests | self._requests
        for target, request in asked.items():
            if target in self.nodes:
                self.nodes[target] = request.reason
            elif request != self._asked.get(target):
                self._begin(target, request, roster, members)
        for target in self._asked.keys() - asked.keys():
            self._cancel(target)
        self._asked = asked
        self.leaves = {
            member: leave for member, leave in self.leaves.items()
            if member in members and self.reason_of(members[member])
        }  # fmt: skip

    def _begin(self, target: str, request: DrainRequest, roster: Roster, members: Mapping[int, MemberInfo]) -> None:
        is_node = any(info.node == target for info in members.values())
        number = target.removeprefix(RANK)
        if is_node or not number.isdecimal():
            self.nodes[target] = request.reason  # also a node that is down now, and may come back
            self._report(f"node {target} is drained ({request.reason}); its ranks move to spares of other nodes")
            return
        info = members.get(roster.ranks.get(int(number), -1))
        if info is None or request.pid not in (None, info.pid):
            self._report(f"drain {target}: the process that had this rank has it no more, or the job has no such rank")
            self._done.add(target)
            return
        self._members[info.member] = target, request.reason
        self._report(f"rank {number} is drained ({request.reason}); it moves to a spare")

    def _cancel(self, target: str) -> None:
        leaving = [member for member, (asked, _) in self._members.items() if asked == target]
        for member in leaving:
            del self._members[member]
        if self.nodes.pop(target, None) is not None:
            self._report(f"node {target} is not drained any more; its processes are spares")
        elif leaving:
            self._report(f"{target} is not drained any more")

    def reason_of(self, info: MemberInfo) -> str:
        """Return the reason for which a member has to leave; empty if it need not leave."""
        return self._members.get(info.member, ("", self.nodes.get(info.node, "")))[1]

    def departs(self, member: int, departure: Departure, now: float) -> None:
        """Note what a member does at its boundary; ``now`` is the value of a monotonic clock in seconds."""
        if departure is Departure.STAYS:
            self._stay.add(member)
        else:
            (self._arrived if departure is Departure.HANDS_OVER else self._given_back)[member] = now

    def gone(self, now: float, lease_s: float, *, waits: bool) -> list[int]:
        """Return the members that have given their rank back, once no other member of their group is waited for.

        A member that hands over its state is waited for as long as it may take. A member that has not reached the
        boundary is waited for :data:`ARRIVE_S` seconds; it may have learned of the boundary too late.

        Args:
            now: value of a monotonic clock in seconds.
            lease_s: lease time in seconds.
            waits: False if the generation is interrupted already, so that waiting has no use.
        """
        if not self._given_back:
            return []
        first = min(self._given_back.values())
        until = {
            member: self._arrived[member] + HAND_OVER_LEASES * lease_s if member in self._arrived else first + ARRIVE_S
            for member in (self.leaves.keys() | self._arrived.keys()) - self._stay - self._given_back.keys()
        }
        return [] if waits and any(now < limit for limit in until.values()) else sorted(self._given_back)

    def formed(self) -> None:
        """Note that the job is formed, so that nobody is at a boundary."""
        self.pace, self.has_no_other = CommitPace(), False
        self._arrived, self._given_back, self._stay = {}, {}, set()

    def left(self, member: int) -> None:
        """Note that a member has left its rank, or has died."""
        self.leaves.pop(member, None)
        self._given_back.pop(member, None)
        self._arrived.pop(member, None)
        if (asked := self._members.pop(member, None)) is not None:
            self._done.add(asked[0])

    def look(
        self,
        roster: Roster,
        members: Mapping[int, MemberInfo],
        committed: int,
        now: float,
        beat_s: float,
        is_enough: Callable[[int], bool],
    ) -> None:
        """Decide which members leave now, and when; called while the job trains.

        Args:
            roster: roster of the ranks that train.
            members: members that live.
            committed: newest iteration that a rank has committed since the job was formed.
            now: value of a monotonic clock in seconds.
            beat_s: seconds between two renewals of a lease.
            is_enough: says for a number of ranks whether the job goes on if so many ranks leave.
        """
        if self._arrived or self._given_back or not (self.nodes or self._members):
            return  # Nobody is to leave, or a new decision would come too late.
        leaving = [
            members[member] for _, member in sorted(roster.ranks.items())
            if member in members and self.reason_of(members[member])
        ]  # fmt: skip
        # Ranks that leave already come first, and the other ranks of their node leave with them.
        leaving.sort(key=lambda info: info.member not in self.leaves)
        group = [info.member for info in leaving if info.node == leaving[0].node]
        pace = self.pace.per_s(now)
        if not group or not pace or self.is_over:
            self.leaves = {}
        elif not is_enough(len(group)):
            self.leaves = {}
            self._say(
                f"the drain of {len(group)} ranks of node {leaving[0].node} waits for spares outside of drained nodes; "
                "start processes on other nodes, or take the drain back"
            )
        else:
            self._said = ""
            after = committed + AHEAD + math.ceil(pace * BEATS_TO_HEAR * beat_s)
            self.leaves = {
                member: Leave(self.leaves[member].after if member in self.leaves else after, turn)
                for turn, member in enumerate(group)
            }

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._report(text)
