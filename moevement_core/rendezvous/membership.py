"""Membership of a job: members that have joined, and their leases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from moevement_core.rendezvous.roster import JOINED, MemberInfo, NoticedBy
from moevement_core.rendezvous.values import Values

LEASES_TO_LEAVE = 3
"""Timeout for a rank to leave an interrupted generation or to acknowledge a roster, as a number of lease times.

After this time, the rank counts as dead.
"""
LEASES_TO_LEAVE_DEVICES = 12
"""Timeout for a rank to leave an interrupted generation in a job with GPUs, as a number of lease times.

It is longer than without GPUs, because each abort of a communicator waits for the device.
"""
RESET_GRACE_S = 0.5
"""Seconds in which a supervisor may reconnect after its connection broke. After that, its members count as dead."""


class Membership:
    """Membership as the coordinator knows it; supervisors renew the leases of their members.

    Args:
        values: values of the job.
        lease_s: lease time in seconds; a member that is silent for so long counts as dead.
        clock: returns monotonic seconds.
    """

    def __init__(self, values: Values, lease_s: float, clock: Callable[[], float]) -> None:
        self.alive: dict[int, MemberInfo] = {}
        """Members that have joined and live, in the order in which they joined."""
        self.dead: set[int] = set()
        self.lease_s = lease_s
        self.joined_at = clock()
        """Value of the clock in seconds when the newest member joined."""
        self._values, self._clock = values, clock
        self._renewed: dict[int, float] = {}
        """Value of the clock in seconds when the lease of each member was last renewed."""
        self._disconnected: dict[int, float] = {}
        """Value of the clock in seconds when the connection of a member's supervisor broke, by member."""
        self._stepped_at = clock()

    @property
    def leave_s(self) -> float:
        """Timeout in seconds for a rank to leave an interrupted generation, or to reach the next phase of leaving."""
        has_devices = any(info.devices for info in self.alive.values())
        return (LEASES_TO_LEAVE_DEVICES if has_devices else LEASES_TO_LEAVE) * self.lease_s

    def welcome(self) -> list[MemberInfo]:
        """Admit and return the members that have joined since the last call."""
        new = []
        for member, card in sorted(self._values.new_reports(JOINED).items()):
            if member in self.dead or member in self.alive:
                continue
            self.alive[member] = info = MemberInfo.decode(card)
            new.append(info)
            self.joined_at = self._clock()
            self._renewed.setdefault(member, self._clock())
        return new

    def renew(self, member: int) -> None:
        """Renew the lease of a member that its supervisor has found alive."""
        if member not in self.dead:
            self._renewed[member] = self._clock()
            self._disconnected.pop(member, None)

    def disconnected(self, members: Iterable[int]) -> None:
        """Note that the connection of the supervisor of ``members`` broke."""
        for member in members:
            if member not in self.dead:
                self._disconnected.setdefault(member, self._clock())

    def lost(self) -> Iterator[tuple[int, str, NoticedBy]]:
        """Yield members whose lease has run out, or whose supervisor has lost its connection and not reconnected.

        Yields:
            The member, a description of its end for log lines, and the way in which its death was noticed.
        """
        now = self._clock()
        if (paused_s := now - self._stepped_at) > self.lease_s / 4:
            # This process was suspended, and has not yet read the renewals that came meanwhile. So it prolongs leases.
            self._renewed = {member: at + paused_s for member, at in self._renewed.items()}
            self._disconnected = {member: at + paused_s for member, at in self._disconnected.items()}
        self._stepped_at = now
        for member, at in list(self._disconnected.items()):
            if now - at > RESET_GRACE_S:
                yield member, "was lost with its supervisor's connection", NoticedBy.RESET
        for member, at in list(self._renewed.items()):
            if now - at > self.lease_s:
                yield member, f"was silent for {self.lease_s:g} s", NoticedBy.LEASE

    def remove(self, member: int) -> float:
        """Mark a member as dead; return the seconds since its lease was last renewed."""
        silent_s = self._clock() - self._renewed.get(member, self._clock())
        self.dead.add(member)
        for known in (self.alive, self._renewed, self._disconnected):
            known.pop(member, None)
        return silent_s

    def waiting(self, but: Collection[int]) -> list[MemberInfo]:
        """Return the members without a rank that could take one, in the order in which they joined.

        Members whose lease was not renewed for a third of the lease time come last, because their node may be lost.
        The list omits members whose supervisor is not connected.

        Args:
            but: members to omit, because they have a rank.
        """
        free = [member for member in self.alive if member not in but and member not in self._disconnected]
        # A silent member may be lost with its node.
        return [self.alive[member] for member in sorted(free, key=self._is_silent)]

    def silent_nodes(self) -> set[str]:
        """Return the nodes with a silent or disconnected member. A node in this set may be lost as a whole.

        A member is silent if its lease was not renewed for a third of the lease time.
        """
        silent = (info.node for member, info in self.alive.items() if self._is_silent(member))
        return {*silent, *(self.alive[member].node for member in self._disconnected if member in self.alive)}

    def hears(self, node: str, but: int) -> bool:
        """Return True if ``node`` is not lost: a member on it other than ``but`` shows signs of life.

        Such a member has a connected supervisor, and its lease was renewed less than a third of the lease time ago.
        """
        others = [member for member, info in self.alive.items() if info.node == node and member != but]
        return any(not self._is_silent(member) and member not in self._disconnected for member in others)

    def _is_silent(self, member: int) -> bool:
        now = self._clock()
        return now - self._renewed.get(member, now) > self.lease_s / 3
