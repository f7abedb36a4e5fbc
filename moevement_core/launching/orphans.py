"""Orphans: processes that outlive the rank that started them. The kernel makes the supervisor their parent (prctl(2)).

For example, a killed rank leaves the server process of a queue that Megatron uses for dense checkpoints. This process
keeps the memory of its imports, and waits forever for its next request. In a job with many failures, orphans would use
up the memory of the hosts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatch
from glob import glob

import psutil

from moevement_core.util.environment import MEMBER_ENV, PARENT_ENV

LOOK_S = 1.0
"""Seconds between two searches for orphans."""
GRACE_S = 5.0
"""Seconds in which an orphan may notice the death of its rank and end by itself, before the supervisor kills it."""
DEVICE_FILES = "/dev/nvidia*"
"""Pattern of device files. A process that has such a file open, such as a fork of a rank, may hold device memory."""
RELEASE_S = 2.0
"""Longest time in seconds by which the supervisor delays the report of a death, until orphans have released the device.

Otherwise the replacement could find the device's memory in use.
"""


class Orphans:
    """Search for orphans on a supervisor's host: the supervisor uses this object to find and kill them.

    An orphan is a process that has outlived the rank which started it. The supervisor recognises an orphan by the
    environment variables that the orphan has inherited from the rank. One thread calls all methods.
    """

    def __init__(self) -> None:
        self._look_at = self._until = -float("inf")
        self._since: dict[psutil.Process, float] = {}
        self._releasing: dict[int, float] = {}
        """Monotonic time in seconds at which :meth:`release_device` was first called, by ended member."""
        self._ending: dict[int, set[psutil.Process]] = {}
        """Processes that :meth:`release_device` has killed and not seen end, by ended member."""

    def expect(self) -> None:
        """Begin to search for orphans, because a process has ended; the search goes on for twice :data:`GRACE_S`."""
        self._until = time.monotonic() + 2 * GRACE_S

    @property
    def is_due(self) -> bool:
        """True if it is time to call :meth:`step`: once a second after a process has ended, and while orphans live."""
        return self._look_at <= time.monotonic() <= self._until

    def step(self, started_pids: Collection[int], living: Collection[int]) -> None:
        """Reap orphans that have ended, and kill those that have outlived their rank by :data:`GRACE_S`.

        Args:
            started_pids: ids of the processes that the supervisor has started and has not seen end. Ids of ended
                processes must not be in it, because the kernel may give them to other processes.
            living: members whose processes live.
        """
        now = time.monotonic()
        self._look_at = now + LOOK_S
        members = {process: _member_of(process) for process in _adopted(started_pids)}
        left = [process for process, member in members.items() if member is not None and member not in living]
        self._since = {process: self._since.get(process, now) for process in left}
        for process, since in self._since.items():
            self.expect()
            if now - since >= GRACE_S:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def release_device(self, member: int, started_pids: Collection[int]) -> bool:
        """Kill the orphans of an ended member that have a device open; return True once all of them have ended.

        A process that ends has neither an environment nor open files any more while its driver still frees the device.
        So the method remembers which processes it has killed.

        While an orphan lives, the device has no memory for the replacement. So the supervisor reports the death only
        after this method has returned True. It returns True after :data:`RELEASE_S` in any case.

        Args:
            member: the member that has ended.
            started_pids: ids of the processes that the supervisor has started and has not seen end.
        """
        if not glob(DEVICE_FILES):
            return True
        ending = self._ending.setdefault(member, set())
        for process in _adopted(started_pids):
            if _member_of(process) == member and _holds_device(process):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                ending.add(process)
        ending -= {process for process in ending if _has_ended(process)}
        since = self._releasing.setdefault(member, time.monotonic())
        if ending and time.monotonic() - since < RELEASE_S:
            return False
        del self._releasing[member], self._ending[member]
        return True


def _adopted(started: Collection[int]) -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process.pid not in started]


def _member_of(process: psutil.Process) -> int | None:
    """Return the member that started a process; None if no member did. If the process is a zombie, reap it.

    The function also returns None for resource trackers of ``multiprocessing``, so that the supervisor does not kill
    them. They remove shared memory after all other processes of a member have ended.
    """
    with suppress(psutil.Error):
        if _has_ended(process):
            return None
        environment = process.environ()
        is_started_by_a_rank = environment.get(PARENT_ENV) == str(os.getpid()) and MEMBER_ENV in environment
        if is_started_by_a_rank and not any("resource_tracker" in word for word in process.cmdline()):
            return int(environment[MEMBER_ENV])
    return None


def _has_ended(process: psutil.Process) -> bool:
    """Return True if a process has ended; reap it if it is a zombie."""
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    if is_zombie:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return is_zombie


def _holds_device(process: psutil.Process) -> bool:
    with suppress(OSError):
        for name in os.listdir(folder := f"/proc/{process.pid}/fd"):
            with suppress(OSError):
                if fnmatch(os.readlink(f"{folder}/{name}"), DEVICE_FILES):
                    return True
    return False
