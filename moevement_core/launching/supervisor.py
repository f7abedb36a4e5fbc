"""Supervisor of the processes of one host: renews their leases, and starts a new process for each one that ends.

The supervisor does no training work, so training cannot delay a lease. A stopped process (SIGSTOP) does not count as
alive, so its lease runs out.

A supervisor that cannot reach the coordinator for the lease time stops its processes (the fence), because replacements
may have taken their ranks. When the supervisor reaches the coordinator again, the processes continue. If the job has
continued without them, the supervisor kills them and starts other processes, which become spares.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from moevement_core import log
from moevement_core.launching.children import Child, end_all
from moevement_core.launching.orphans import Orphans
from moevement_core.rendezvous.coordinator import Coordinator
from moevement_core.rendezvous.drains import Leave
from moevement_core.rendezvous.status_page import PAGE_ENV, StatusPage, boot_time_s
from moevement_core.util.exit_codes import BROKEN_DEVICE, REPLACES_ENV, USAGE_ERROR

FIRST_BACK_OFF_S = 1.0
"""Seconds from a failed start of a process to the next start; the time doubles for each further failure in a row."""
LONGEST_BACK_OFF_S = 60.0
"""Longest time from a failed start of a process to the next start, in seconds."""
LOOK_S = 0.2
"""Seconds between two checks for stopped processes."""


class Link(Protocol):
    """Interface through which a supervisor reaches the coordinator, in this process or over a connection."""

    lease_s: float
    """Lease time in seconds."""

    @property
    def held_until(self) -> float:
        """Time at which the leases of this supervisor's processes end, in seconds of the boot-time clock."""

    @property
    def given_up(self) -> set[int]:
        """Members that the coordinator counts as dead; the supervisor kills their processes if they still run."""

    @property
    def leaves(self) -> Mapping[int, Leave]:
        """Members that are to give their rank back."""

    def died(self, member: int, pid: int, how: str) -> None:
        """Report that the process of a member has ended.

        Args:
            member: the member.
            pid: process id of the member.
            how: description of the process's end, for log lines.
        """

    def step(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        """Renew the leases if that is due; the supervisor calls this often.

        Args:
            members: all members of this supervisor that have not ended.
            alive: members that run and are not stopped (SIGSTOP), each with the newest iteration that it has committed.
        """


class LocalLink:
    """Link to a coordinator in this process, which is always reachable."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.lease_s = coordinator.membership.lease_s

    @property
    def held_until(self) -> float:
        """Time at which the leases end, in seconds of the boot-time clock.

        It is always a full lease time from now, because the coordinator in this process can always be reached.
        """
        return boot_time_s() + self.lease_s

    @property
    def given_up(self) -> set[int]:
        """Members that the coordinator counts as dead without a report of their end."""
        return self._coordinator.given_up

    @property
    def leaves(self) -> Mapping[int, Leave]:
        """Members that are to give their rank back."""
        return self._coordinator.drains.leaves

    def died(self, member: int, pid: int, how: str) -> None:
        """Report the end of a process to the coordinator."""
        self._coordinator.died(member, pid, how)

    def step(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        """Renew the leases of the members in ``alive``."""
        self._coordinator.renew(alive)


class Supervisor:
    """Supervisor of the processes of this host. One thread calls all methods.

    Args:
        first: members to start at once.
        start: starts the process of a member; called with its number and with environment variables for the process.
        next_member: returns the number for the next process that is started in place of an ended one.
        link: connection to the coordinator.
        on_end: called with a member and its ended process; returns True if a new process is to start in its place.
        on_replaced: called with the ended member, its process, and the new process in its place.
        may_settle: returns True if the job does not need new processes at once. A new process then idles at first, so
            that its start does not slow down a recovery.
        pause: waits for some seconds, and meanwhile serves the processes; the supervisor calls it while they end.
        respawn_after_s: seconds from the end of a process to the start of a new one in its place; infinite: none is
            started.
    """

    def __init__(
        self,
        first: Iterable[int],
        start: Callable[[int, dict[str, str]], Child],
        next_member: Callable[[], int],
        link: Link,
        on_end: Callable[[int, Child], bool],
        on_replaced: Callable[[int, Child, Child], None],
        may_settle: Callable[[], bool] = lambda: False,
        pause: Callable[[float], None] = time.sleep,
        respawn_after_s: float = 0.0,
    ) -> None:
        self.children: dict[int, Child] = {}
        """Every process that was ever started, by member."""
        self.others: set[int] = set()
        """Ids of further processes of the caller, which are no orphans of ranks."""
        self.is_fenced = False
        """True while the leases have run out, and the supervisor has stopped its processes (SIGSTOP)."""
        self._start, self._next_member, self._link = start, next_member, link
        self._on_end, self._on_replaced, self._may_settle = on_end, on_replaced, may_settle
        self._pause, self._respawn_after_s = pause, respawn_after_s
        self._failed_starts = 0
        """Number of processes in a row that ended with a positive exit code or could not be started."""
        self._respawns: list[tuple[float, int, Child]] = []
        """Processes to be started in place of ended ones: monotonic time of the start in seconds, ended member, and the
        ended process."""
        self._is_winding_down = False
        self._orphans = Orphans()
        self._pages: dict[int, StatusPage] = {}
        self._running: set[int] = set()
        self._stopped: set[int] = set()
        self._was_asked: set[int] = set()
        """Members that were asked to give their rank back."""
        self._looked_at = -float("inf")
        for member in first:
            self.start(member)

    def start(self, member: int, *, settles: bool = False, replaces: int | None = None) -> Child:
        """Start the process of a member.

        Args:
            member: the member.
            settles: True if the process idles at first, to leave the processors to a recovery.
            replaces: the ended member in whose place the process starts; None for a process that starts with the job.
                A process that starts in place of another reports all of its errors. Of the processes that start with
                the job, only rank 0 reports an error that all of them find.
        """
        page = StatusPage()
        try:
            page.hold_until(self._link.held_until)
            if self._is_winding_down:
                page.ask_to_wind_down()
            page.set_waiting(waits=settles)
            variables = {PAGE_ENV: page.path, **({} if replaces is None else {REPLACES_ENV: str(replaces)})}
            child = self.children[member] = self._start(member, variables)
        except BaseException:
            page.close()
            raise
        self._pages[member] = page
        self._running.add(member)
        return child

    @property
    def running(self) -> list[Child]:
        """Processes whose end the supervisor has not seen."""
        return [self.children[member] for member in sorted(self._running)]

    def step(self) -> None:
        """Look at every process, renew leases, and start, stop or kill processes as needed; never block."""
        self._fence()
        for member in sorted(self._running):
            child = self.children[member]
            if child.poll() is not None and self._orphans.release_device(member, self._pids()):
                self._has_ended(member, child)
        if self._orphans.is_due:
            self._orphans.step(self._pids(), self._running)
        self._respawn()
        for member in self._running & self._link.given_up:
            self.children[member].send(signal.SIGKILL)  # SIGKILL also ends stopped processes.
        if not self._may_settle():
            for member in self._running:
                self._pages[member].set_waiting(waits=False)
        self._look_for_stopped()
        alive = {member: self._pages[member].committed for member in self._running - self._stopped}
        self._link.step(self._running, alive)
        self._hold()

    def _pids(self) -> set[int]:
        return {child.pid for child in self.running} | self.others

    def _has_ended(self, member: int, child: Child) -> None:
        self._orphans.expect()
        self._running.discard(member)
        self._stopped.discard(member)
        self._pages.pop(member).close()
        self._failed_starts = self._failed_starts + 1 if (child.code or 0) > 0 and member not in self._was_asked else 0
        if self._on_end(member, child):
            after_s = max(self._respawn_after_s, self._back_off_s())
            self._respawns.append((time.monotonic() + after_s, member, child))

    def _back_off_s(self) -> float:
        if not self._failed_starts:
            return 0.0
        return min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(self._failed_starts - 1, 10))

    def _respawn(self) -> None:
        due = [respawn for respawn in self._respawns if respawn[0] <= time.monotonic()]
        self._respawns = [respawn for respawn in self._respawns if respawn not in due]
        for _, member, child in due:
            try:
                new = self.start(self._next_member(), settles=self._may_settle(), replaces=member)
            except OSError as error:  # The host has no process, memory or file left for now. Running processes go on.
                self._failed_starts += 1
                after_s = self._back_off_s()
                log.warning(
                    f"no process can be started: {error}; the job continues, and the next attempt is in {after_s:g} s"
                )
                self._respawns.append((time.monotonic() + after_s, member, child))
                continue
            self._on_replaced(member, child, new)

    def _look_for_stopped(self) -> None:
        if self.is_fenced or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        self._stopped = {member for member in self._running if self.children[member].is_stopped()}

    def _hold(self) -> None:
        held_until = self._link.held_until
        for member in self._running:
            self._pages[member].hold_until(held_until)
            leave = self._link.leaves.get(member)
            if leave is None:
                self._pages[member].ask_to_leave(None)
            else:
                self._was_asked.add(member)
                self._pages[member].ask_to_leave(leave.after, leave.turn)

    def _fence(self) -> None:
        is_held = boot_time_s() < self._link.held_until
        if is_held == (not self.is_fenced):
            return
        self.is_fenced = not is_held
        for member in self._running - self._stopped:
            if not is_held:
                self.children[member].send(signal.SIGSTOP)
            elif member not in self._link.given_up:
                self.children[member].send(signal.SIGCONT)

    def wind_down(self) -> None:
        """Ask all processes, and those started later, to end the job at the next boundary between iterations."""
        self._is_winding_down = True
        for member in self._running:
            self._pages[member].ask_to_wind_down()

    def end(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for the processes to end by themselves, and then end the others."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(child.poll() is None for child in self.running):
            self._link.step((), {})
            self._pause(0.02)
        end_all(self.running)


def is_mistake(child: Child, *, has_begun: bool, has_trained: bool) -> bool:
    """Return True if a process has ended because of a mistake in the flags or the script.

    A mistake would end every other process as well, so the job ends. Once the job has trained, the answer is always
    False: flags and script have worked. Later changes (an edited configuration, a removed folder, a full disk) only
    affect processes that start later.

    Args:
        child: the ended process.
        has_begun: True if the coordinator has formed the job.
        has_trained: True if the job has committed an iteration, or was formed without a rank for this process.
    """
    code = child.code or 0
    if code == BROKEN_DEVICE:  # Other processes have other devices.
        return False
    return not has_trained and (code == USAGE_ERROR or (code > 0 and not has_begun))
