"""A page of memory that a process shares with its supervisor: whether it may act, and how far it has come.

The supervisor makes it (:class:`~moevement_core.memory_file.MemoryFile`), and both map it. Neither ever waits for the
other, and nothing on disk is needed for it.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from moevement_core.memory_file import MemoryFile

PAGE_ENV = "MOEVEMENT_STATUS_PAGE"
"""Path of the page; unset in a process without a supervisor, whose lease never ends."""
_FIELDS = struct.Struct("<dqqq")
"""Lease held until (boot-time clock), newest committed iteration, is to wind down, is to wait before it begins."""
_COMMITTED, _WINDS_DOWN, _WAITS = 8, 16, 24
"""Offsets of the fields after the first."""
_NOTHING = -1
POLL_S = 0.02


def boot_time_s() -> float:
    """Seconds since the machine started, those in which it was suspended too; the same for all of its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StatusPage:
    """Status page of one process.

    Args:
        path: of a page that another process made; None: make one, with a lease that never ends.

    Raises:
        OSError: a new page cannot be had.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file: MemoryFile | None = None
        if path is None:
            page = _FIELDS.pack(float("inf"), _NOTHING, 0, 0)
            self._file = MemoryFile("moevement-status", page)
            path = self._file.path
        self.path = str(path)
        """Path under which another process opens the page."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, _FIELDS.size)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Give back what the maker holds; a process that has mapped the page keeps it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # The supervisor

    def hold_until(self, boot_time_s: float) -> None:
        """Let the process act until then."""
        struct.pack_into("<d", self._memory, 0, boot_time_s)

    def ask_to_wind_down(self) -> None:
        """Ask the process to end its job at the next boundary between iterations."""
        struct.pack_into("<q", self._memory, _WINDS_DOWN, 1)

    def let_wait(self, *, waits: bool) -> None:
        """Have the process do nothing before it begins, or let it begin."""
        struct.pack_into("<q", self._memory, _WAITS, waits)

    @property
    def committed(self) -> int | None:
        """The newest iteration that the process has committed; nothing before the first."""
        iteration = int(struct.unpack_from("<q", self._memory, _COMMITTED)[0])
        return None if iteration == _NOTHING else iteration

    # The process

    def commit(self, iteration: int) -> None:
        """Say how far this process has come."""
        struct.pack_into("<q", self._memory, _COMMITTED, iteration)

    @property
    def is_winding_down(self) -> bool:
        """True if the job is to end at the next boundary."""
        return bool(struct.unpack_from("<q", self._memory, _WINDS_DOWN)[0])

    @property
    def is_waiting(self) -> bool:
        """True if the process has to pause: a recovery is under way, and needs the processors more."""
        return bool(struct.unpack_from("<q", self._memory, _WAITS)[0])

    @property
    def is_held(self) -> bool:
        """True while this process may act."""
        return boot_time_s() < float(struct.unpack_from("<d", self._memory, 0)[0])


_page: StatusPage | None = None


def own_page() -> StatusPage | None:
    """The page of this process; nothing without a supervisor."""
    global _page
    if _page is None and (path := os.environ.get(PAGE_ENV)):
        _page = StatusPage(path)
    return _page


def wait_until_held() -> None:
    """Block while this process does not hold its lease.

    Called before anything that others would see: an update, a manifest, a line of metrics. A process whose lease ran
    out may have lost its rank to another one. Its supervisor either renews the lease or ends the process.
    """
    page = own_page()
    while page is not None and not page.is_held:
        time.sleep(POLL_S)
