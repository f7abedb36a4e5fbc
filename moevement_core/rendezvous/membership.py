"""Live members of a job, and their leases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from moevement_core.rendezvous.now_and_then import Now
from moevement_core.rendezvous.roster import CARDS, JOINED, MEMBER, MemberInfo, NoticedBy
from moevement_core.rendezvous.signed_store import SignedStore

LEASES_TO_LEAVE = 3
"""Lease times that a rank has to stop after an interruption, or to acknowledge a roster."""
LEASES_TO_LEAVE_DEVICES = 12
"""Lease times that a rank has to stop where members have devices: all communicators are aborted, and each waits for its
device.
"""
RESET_GRACE_S = 0.5
"""Seconds that a supervisor has to connect again after its connection broke."""


class Membership:
    """Membership as the coordinator sees it; supervisors renew the leases of members.

    Args:
        store: the job's.
        lease_s: after so many seconds without a word of it a member is dead.
        clock: seconds, monotonic.
    """

    def __init__(self, store: SignedStore, lease_s: float, clock: Callable[[], float]) -> None:
        self.alive: dict[int, MemberInfo] = {}
        """Everyone who has joined and lives."""
        self.dead: set[int] = set()
        self.lease_s = lease_s
        self.joined_at = clock()
        """Time at which the newest member joined."""
        self._store, self._clock = store, clock
        self._look = Now(clock)
        self._renewed: dict[int, float] = {}
        """Time of the last renewal of each member's lease."""
        self._disconnected: dict[int, float] = {}
        """Members whose supervisor's connection broke, and when."""
        self._stepped_at = clock()

    @property
    def leave_s(self) -> float:
        """Seconds that a rank has for each phase of leaving that it reports, and for all that it does not report."""
        has_devices = any(info.devices for info in self.alive.values())
        return (LEASES_TO_LEAVE_DEVICES if has_devices else LEASES_TO_LEAVE) * self.lease_s

    def welcome(self) -> list[MemberInfo]:
        """Take in, and return, who has joined since."""
        new = list[MemberInfo]()
        if not self._look.is_due(rung=self._store.has_rung(JOINED)):
            return new
        with self._look:
            named = (key.removeprefix(CARDS).split("/") for key in self._store.keys(CARDS))
            numbers = {int(name[0]) for name in named if len(name) == 2 and name[1] == self._store.tag(name[0])}
            for member in sorted(numbers - self.alive.keys() - self.dead):
                if (card := self._store.read(MEMBER.format(member, self._store.tag(str(member))))) is not None:
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
        """The connection of the supervisor of these members broke."""
        for member in members:
            if member not in self.dead:
                self._disconnected.setdefault(member, self._clock())

    def lost(self) -> Iterator[tuple[int, str, NoticedBy]]:
        """Members whose lease has run out, or whose supervisor is gone; how, and how it was noticed."""
        now = self._clock()
        if (paused_s := now - self._stepped_at) > self.lease_s / 4:
            # This process did not run: what was sent to it meanwhile has not been read.
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
        """Mark a member as dead; return the seconds since it was last heard."""
        silent_s = self._clock() - self._renewed.get(member, self._clock())
        self.dead.add(member)
        for known in (self.alive, self._renewed, self._disconnected):
            known.pop(member, None)
        return silent_s

    def waiting(self, but: Collection[int]) -> list[int]:
        """Members that could take a rank; in the order in which they came.

        Args:
            but: those that have one.
        """
        free = [member for member in self.alive if member not in but and member not in self._disconnected]
        # Those that were heard of lately first: one that is silent might be lost with its node.
        return sorted(free, key=self._is_silent)

    def silent_nodes(self) -> set[str]:
        """Nodes with a member that was not heard of lately: they might be lost."""
        silent = (info.node for member, info in self.alive.items() if self._is_silent(member))
        return {*silent, *(self.alive[member].node for member in self._disconnected if member in self.alive)}

    def hears(self, node: str, but: int) -> bool:
        """Return whether another member of this node than ``but`` was heard of lately, so that the node lives."""
        others = [member for member, info in self.alive.items() if info.node == node and member != but]
        return any(not self._is_silent(member) and member not in self._disconnected for member in others)

    def _is_silent(self, member: int) -> bool:
        now = self._clock()
        return now - self._renewed.get(member, now) > self.lease_s / 3
