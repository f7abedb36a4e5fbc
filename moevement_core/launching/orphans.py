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

import psutil

from moevement_core.restart.environment import MEMBER_ENV, PARENT_ENV

LOOK_S = 1.0
GRACE_S = 5.0
"""For those that find out by themselves that nobody needs them."""


class Orphans:
    """Processes that outlive the rank which started them, found and ended by one supervisor.

    They are known by the variables of its ranks in their environment. One thread calls this.
    """

    def __init__(self) -> None:
        self._look_at = self._until = -float("inf")
        self._since: dict[psutil.Process, float] = {}

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
        adopted = [process for process in psutil.Process().children() if process.pid not in ours]
        left = [process for process in adopted if self._is_left(process, living)]
        self._since = {process: self._since.get(process, now) for process in left}
        for process, since in self._since.items():
            self.expect()
            if now - since >= GRACE_S:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _is_left(self, process: psutil.Process, living: Collection[int]) -> bool:
        """Whether it lives, and was started by a process of ours that has ended. A zombie is collected.

        Not resource trackers of multiprocessing, which remove shared memory when the last of the others has ended.
        """
        with suppress(psutil.Error, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
                return False
            environment = process.environ()
            is_of_ours = environment.get(PARENT_ENV) == str(os.getpid()) and MEMBER_ENV in environment
            if is_of_ours and int(environment[MEMBER_ENV]) not in living:
                return not any("resource_tracker" in word for word in process.cmdline())
        return False
