"""What processes that died have left behind: this process, the nearest subreaper, has adopted it.

A rank that is killed leaves what it had started: the server of a queue of Megatron's dense checkpoints, for example, of
as much memory as its imports take, which would wait for its next request for ever. A job of many failures would fill
its hosts with them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatch
from glob import glob

import psutil

from moevement_core.restart.environment import MEMBER_ENV, PARENT_ENV

LOOK_S = 1.0
GRACE_S = 5.0
"""For those that find out by themselves that nobody needs them."""
DEVICE_FILES = "/dev/nvidia*"
"""A process that has one of these open may hold memory of a device; so does what a rank with a context has forked."""
RELEASE_S = 2.0
"""How long the death of a rank is held back until what it left has let go of its device."""


class Orphans:
    """Processes that outlive the rank which started them, found and ended by one supervisor.

    They are known by the variables of its ranks in their environment. One thread calls this.
    """

    def __init__(self) -> None:
        self._look_at = self._until = -float("inf")
        self._since: dict[psutil.Process, float] = {}
        self._releasing: dict[int, float] = {}
        """Since when each member's device is waited for."""

    def expect(self) -> None:
        """A process has ended: look for a while."""
        self._until = time.monotonic() + 2 * GRACE_S

    @property
    def is_due(self) -> bool:
        """Whether to :meth:`step` now: for a while after a process has ended, and as long as one is left."""
        return self._look_at <= time.monotonic() <= self._until

    def step(self, ours: Collection[int], living: Collection[int]) -> None:
        """Collect what has ended, and end what is left after the grace time.

        Args:
            ours: processes that the supervisor has started and not seen to end; later others may have their numbers.
            living: members whose processes live.
        """
        now = time.monotonic()
        self._look_at = now + LOOK_S
        members = {process: _member_of(process) for process in _adopted(ours)}
        left = [process for process, member in members.items() if member is not None and member not in living]
        self._since = {process: self._since.get(process, now) for process in left}
        for process, since in self._since.items():
            self.expect()
            if now - since >= GRACE_S:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def release_device(self, member: int, ours: Collection[int]) -> bool:
        """End at once what a member that has ended left with a device open; return whether it has let go.

        Until then the device has no memory for the process that takes over, so the death is reported afterwards. To be
        called again until it returns True, as it does after :data:`RELEASE_S` in any case.

        Args:
            member: that has ended.
            ours: processes that the supervisor has started and not seen to end.
        """
        if not glob(DEVICE_FILES):
            return True
        holders = [process for process in _adopted(ours) if _member_of(process) == member and _holds_device(process)]
        for process in holders:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        since = self._releasing.setdefault(member, time.monotonic())
        if holders and time.monotonic() - since < RELEASE_S:
            return False
        del self._releasing[member]
        return True


def _adopted(ours: Collection[int]) -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process.pid not in ours]


def _member_of(process: psutil.Process) -> int | None:
    """Return the member that started a process which lives; None for any other one. A zombie is collected.

    None for resource trackers of multiprocessing, which remove shared memory when the last of the others has ended.
    """
    with suppress(psutil.Error, ChildProcessError):
        if process.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(process.pid, os.WNOHANG)
            return None
        environment = process.environ()
        is_of_ours = environment.get(PARENT_ENV) == str(os.getpid()) and MEMBER_ENV in environment
        if is_of_ours and not any("resource_tracker" in word for word in process.cmdline()):
            return int(environment[MEMBER_ENV])
    return None


def _holds_device(process: psutil.Process) -> bool:
    with suppress(OSError):
        for name in os.listdir(folder := f"/proc/{process.pid}/fd"):
            with suppress(OSError):
                if fnmatch(os.readlink(f"{folder}/{name}"), DEVICE_FILES):
                    return True
    return False
