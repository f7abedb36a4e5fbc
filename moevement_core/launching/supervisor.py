"""Watches the processes of one host, renews their leases, and starts another for each one that ends.

The supervisor does no training work, so nothing that training does can delay a lease. A process that it finds stopped
is not alive: its lease runs out. When the supervisor itself cannot reach the coordinator for the lease time it stops
its processes (the fence): they may have lost their ranks to others. When it is heard again they go on, or, if the job
has gone on without them, they are killed and others start in their places as spares.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from moevement_core import log
from moevement_core.exit_codes import BROKEN_DEVICE, REPLACES_ENV, USAGE_ERROR
from moevement_core.launching.children import Child, end_all
from moevement_core.launching.orphans import Orphans
from moevement_core.rendezvous.coordinator import Coordinator
from moevement_core.rendezvous.status_page import PAGE_ENV, StatusPage, boot_time_s

FIRST_BACK_OFF_S = 1.0
"""Seconds before the next start after a process could not start; doubled for each further one in a row."""
LONGEST_BACK_OFF_S = 60.0
LOOK_S = 0.2
"""How often it is looked whether processes are stopped."""


class Link(Protocol):
    """The way to the coordinator: a connection, or, where it is in this process, the thing itself."""

    lease_s: float

    @property
    def held_until(self) -> float:
        """Until when this supervisor's processes may act, in seconds of the boot-time clock."""

    @property
    def given_up(self) -> set[int]:
        """Processes that the job goes on without."""

    def died(self, member: int, pid: int, how: str) -> Any:
        """A process has ended."""

    def step(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        """Renew leases, if it is time to."""


class LocalLink:
    """To a coordinator in this process, which is always reached."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.lease_s = coordinator.lease_s

    @property
    def held_until(self) -> float:
        """As long from now as there are leases: nothing lies between."""
        return boot_time_s() + self.lease_s

    @property
    def given_up(self) -> set[int]:
        """Processes that the job goes on without."""
        return self._coordinator.given_up

    def died(self, member: int, pid: int, how: str) -> int | None:
        """A process has ended."""
        return self._coordinator.died(member, pid, how)

    def step(self, members: Iterable[int], alive: Mapping[int, int | None]) -> None:
        """Renew leases."""
        self._coordinator.renew(alive)


class Supervisor:
    """Of the processes of this host. All methods are for one thread.

    Args:
        first: the members to start with.
        start: starts the process of a member, with these variables in its environment beside all others.
        next_member: a number for a process more.
        link: to the coordinator.
        on_end: called when a process has ended; returns whether another one starts.
        on_replaced: called with the process that ended and the one that was started for it.
        may_settle: whether nobody waits for processes that are started now, so that they are to do nothing at first.
        respawn_after_s: how long after a process has ended another one is started in its place; infinite: never.
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
        respawn_after_s: float = 0.0,
    ) -> None:
        self.children: dict[int, Child] = {}
        """All that were ever started, by member."""
        self.is_fenced = False
        self._start, self._next_member, self._link = start, next_member, link
        self._on_end, self._on_replaced, self._may_settle = on_end, on_replaced, may_settle
        self._respawn_after_s = respawn_after_s
        self._failed_starts = 0
        """Processes in a row that ended with a positive code."""
        self._respawns: list[tuple[float, int, Child]] = []
        """When which member's process is followed by another one."""
        self._is_winding_down = False
        self._orphans = Orphans()
        self._pages: dict[int, StatusPage] = {}
        self._running: set[int] = set()
        self._stopped: set[int] = set()
        self._looked_at = -float("inf")
        for member in first:
            self.start(member)

    def start(self, member: int, *, settles: bool = False, replaces: int | None = None) -> Child:
        """Start the process of a member.

        Args:
            member: its number.
            settles: whether it is to do nothing for a while.
            replaces: the member that ended and in whose place it starts; it reports by itself what it finds wrong.
        """
        page = StatusPage()
        try:
            page.hold_until(self._link.held_until)
            if self._is_winding_down:
                page.ask_to_wind_down()
            page.let_wait(waits=settles)
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
        """Those that have not been seen to end."""
        return [self.children[member] for member in sorted(self._running)]

    def step(self) -> None:
        """Look at every process and do what is to be done; never waits."""
        self._fence()
        for member in sorted(self._running):
            child = self.children[member]
            if child.poll() is not None and self._orphans.release_device(member, self._pids()):
                self._has_ended(member, child)
        if self._orphans.is_due:
            self._orphans.step(self._pids(), self._running)
        self._respawn()
        for member in self._running & self._link.given_up:
            self.children[member].send(signal.SIGKILL)  # stopped or not
        if not self._may_settle():
            for member in self._running:
                self._pages[member].let_wait(waits=False)
        self._look_for_stopped()
        alive = {member: self._pages[member].committed for member in self._running - self._stopped}
        self._link.step(self._running, alive)
        self._hold()

    def _pids(self) -> set[int]:
        return {child.pid for child in self.running}

    def _has_ended(self, member: int, child: Child) -> None:
        self._orphans.expect()
        self._running.discard(member)
        self._stopped.discard(member)
        self._pages.pop(member).close()
        self._failed_starts = self._failed_starts + 1 if (child.code or 0) > 0 else 0
        if self._on_end(member, child):
            after_s = max(self._respawn_after_s, self._back_off_s())
            self._respawns.append((time.monotonic() + after_s, member, child))

    def _back_off_s(self) -> float:
        if not self._failed_starts:
            return 0.0
        return min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(self._failed_starts - 1, 10))

    def _respawn(self) -> None:
        due = [one for one in self._respawns if one[0] <= time.monotonic()]
        self._respawns = [one for one in self._respawns if one not in due]
        for _, member, child in due:
            try:
                new = self.start(self._next_member(), settles=self._may_settle(), replaces=member)
            except OSError as error:  # no process, memory or file is left for now: those that run go on
                self._failed_starts += 1
                after_s = self._back_off_s()
                log.warning(
                    f"no process can be started: {error}; the job goes on, and the next try is in {after_s:g} s"
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
        """Have the job end at the next boundary between iterations that all ranks agree on."""
        self._is_winding_down = True
        for member in self._running:
            self._pages[member].ask_to_wind_down()

    def end(self, timeout_s: float) -> None:
        """Wait for the processes to end by themselves, and then end those that have not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(child.poll() is None for child in self.running):
            time.sleep(0.02)
        end_all(self.running)


def is_mistake(child: Child, *, has_begun: bool, has_trained: bool) -> bool:
    """Return whether every process of the job would end as this one did, by a mistake in flags or script.

    Once the job trains, that is no longer so: flags were good then, and what has changed since (a configuration that
    is being edited, a folder that is gone, a full disk) concerns the process that started later, and not the job.

    Args:
        child: the process; it has ended.
        has_begun: whether the job was formed.
        has_trained: whether the job has trained, or this process took no part in it.
    """
    code = child.code or 0
    if code == BROKEN_DEVICE:  # which others do not have
        return False
    return not has_trained and (code == USAGE_ERROR or (code > 0 and not has_begun))
