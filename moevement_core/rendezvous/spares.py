"""Members without a rank that may take one, and the nodes and devices that the job avoids."""

from __future__ import annotations

from collections.abc import Callable

from moevement_core.rendezvous.devices import identity, with_free_device
from moevement_core.rendezvous.drains import Drains
from moevement_core.rendezvous.membership import Membership
from moevement_core.rendezvous.roster import Roster, UnusableDevice


class SparePool:
    """Members without a rank, and what is known about the places where they run.

    Args:
        membership: members of the job.
        drains: nodes and ranks that are drained.
        report: called with a line of text for the user.
    """

    def __init__(self, membership: Membership, drains: Drains, report: Callable[[str], None]) -> None:
        self.suspect_nodes: set[str] = set()
        """Nodes of processes that computed NaN or wrong results; spares on these nodes take over ranks last."""
        self.broken: set[str] = set()
        """Identities of devices that no process can use."""
        self._left_nodes: set[str] = set()
        """Nodes that ranks have left because they were drained; they get ranks last when the job is formed next."""
        self._left_devices: set[str] = set()
        """Devices that ranks have left because they were drained; nobody gets them when the job is formed next."""
        self._membership, self._drains, self._report = membership, drains, report

    def waiting(self, roster: Roster) -> list[int]:
        """Return the members without a rank in ``roster`` that could take one, in the order in which they joined.

        Members come last if their node may be lost, or if a process on their node has computed wrong results. The
        list omits members on drained nodes, unless the job is to end at the next boundary. Once the job was formed, it
        also omits members for which no free device is left.
        """
        barred = self._drains.barred_nodes
        free = [info for info in self._membership.waiting(set(roster.ranks.values())) if info.node not in barred]
        waiting = sorted(free, key=lambda info: info.node in self.suspect_nodes)
        if roster.generation >= 0 and (self.broken or any(info.devices for info in waiting)):
            waiting = with_free_device(waiting, self._devices_in_use(roster))
        return [info.member for info in waiting]

    def _devices_in_use(self, roster: Roster) -> set[str]:
        ranks = [(self._membership.alive.get(member), roster.devices[rank]) for rank, member in roster.ranks.items()]
        in_use = {identity(info, number) for info, number in ranks if info is not None}
        return in_use | self.broken | self._left_devices

    @property
    def avoided_nodes(self) -> set[str]:
        """Nodes that get ranks last."""
        return self.suspect_nodes | self._left_nodes

    def returned(self, node: str, unusable: UnusableDevice) -> str:
        """Note that a member has given its rank back, because it cannot use its device.

        If the device is broken, no other process gets it.

        Returns:
            The description of the member's end, for log lines.
        """
        what = "has computed wrong results" if unusable.has_computed_wrong else "cannot be used"
        if unusable.has_computed_wrong:
            self.suspect_nodes.add(node)
        if unusable.is_broken and unusable.device:
            self.broken.add(unusable.device)
            self._report(f"device {unusable.device} of {node} is broken and is not used any more: {unusable.reason}")
        return f"gave its rank back because its device {what} ({unusable.reason})"

    def drained(self, member: int, roster: Roster) -> None:
        """Note the node and the device that a drained member leaves."""
        info, rank = self._membership.alive[member], roster.rank_of(member)
        self._left_nodes.add(info.node)
        if rank is not None and rank in roster.devices:
            self._left_devices.add(identity(info, roster.devices[rank]))

    def formed(self) -> None:
        """Note that the job is formed, so that places which drained ranks have left may be used again."""
        self._left_nodes, self._left_devices = set(), set()
