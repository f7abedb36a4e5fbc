"""A page of memory that a process shares with its supervisor: whether it may act, and how far it has come.

A file of a few bytes in the supervisor's temporary folder, mapped by both. Neither ever waits for the other.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

PAGE_ENV = "MOEVEMENT_STATUS_PAGE"
"""The file; unset in a process without a supervisor, whose lease never ends."""
_FIELDS = struct.Struct("<dqq")  # lease held until (boot-time clock), newest committed iteration, wind down
_NOTHING = -1
POLL_S = 0.02


def boot_time_s() -> float:
    """Seconds since the machine started, those in which it was suspended too; the same for all of its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StatusPage:
    """One process's page.

    Args:
        path: the file; made, with a lease that never ends, where there is none yet.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            is_new = os.fstat(descriptor).st_size == 0
            os.ftruncate(descriptor, _FIELDS.size)
            self._memory = mmap.mmap(descriptor, _FIELDS.size)
        finally:
            os.close(descriptor)
        if is_new:
            _FIELDS.pack_into(self._memory, 0, float("inf"), _NOTHING, 0)

    # The supervisor

    def hold_until(self, boot_time_s: float) -> None:
        """Let the process act until then."""
        struct.pack_into("<d", self._memory, 0, boot_time_s)

    def ask_to_wind_down(self) -> None:
        """Ask the process to end its job at the next boundary between iterations."""
        struct.pack_into("<q", self._memory, 16, 1)

    @property
    def committed(self) -> int | None:
        """The newest iteration that the process has committed; nothing before the first."""
        iteration = int(struct.unpack_from("<q", self._memory, 8)[0])
        return None if iteration == _NOTHING else iteration

    # The process

    def commit(self, iteration: int) -> None:
        """Say how far this process has come."""
        struct.pack_into("<q", self._memory, 8, iteration)

    @property
    def is_winding_down(self) -> bool:
        """Whether the job is to end at the next boundary."""
        return bool(struct.unpack_from("<q", self._memory, 16)[0])

    @property
    def is_held(self) -> bool:
        """Whether this process may act."""
        return boot_time_s() < float(struct.unpack_from("<d", self._memory, 0)[0])


_page: StatusPage | None = None


def own_page() -> StatusPage | None:
    """The page of this process; nothing without a supervisor."""
    global _page
    if _page is None and (path := os.environ.get(PAGE_ENV)):
        _page = StatusPage(Path(path))
    return _page


def wait_until_held() -> None:
    """Block while this process does not hold its lease.

    Called before anything that others would see: an update, a manifest, a line of metrics. A process whose lease ran
    out may have lost its rank to another one. Its supervisor either renews the lease or ends the process.
    """
    page = own_page()
    while page is not None and not page.is_held:
        time.sleep(POLL_S)
