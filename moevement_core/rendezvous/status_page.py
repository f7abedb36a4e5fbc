"""Status page: memory that a process shares with its supervisor.

The page holds the lease and the progress of the process, and the supervisor's requests to the process. The supervisor
makes the page (:class:`~moevement_core.util.memory_file.MemoryFile`), and both processes map it. Neither process waits
for the other, and the page needs no disk.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from moevement_core.util.memory_file import MemoryFile

PAGE_ENV = "MOEVEMENT_STATUS_PAGE"
"""Environment variable: path of the page that this process shares with its supervisor.

The variable is unset in a process without a supervisor; the lease of such a process never ends.
"""
_FIELDS = struct.Struct("<dqqqqq")
"""Fields of the page, in this order:

- end of the lease, in seconds of the boot-time clock;
- newest committed iteration;
- 1 if the job is to end at the next boundary between iterations, else 0;
- 1 if a process that has just been started is to idle before it runs its script, else 0;
- iteration after which the process gives its rank back, plus 1; 0 if it keeps its rank;
- number of processes that give their rank back before this one if they have no peer on another node.

Struct stores a field byte by byte, so that the other process may read half of it. The last two fields, on which a
process acts at once, are stored as whole words.
"""
_COMMITTED, _WINDS_DOWN, _WAITS = 8, 16, 24
"""Offsets in bytes of the second, third and fourth field of the page."""
_LEAVES, _TURN = 4, 5
"""Numbers of the last two fields, counted in words of eight bytes."""
_NOTHING = -1
"""Value of the committed iteration before the first commit."""
POLL_S = 0.02
"""Seconds between two checks of the lease while a process waits because its lease has run out."""


def boot_time_s() -> float:
    """Return the seconds since the host started, including time in suspension; the clock is common to all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StatusPage:
    """Status page of one process: memory for its lease and its progress. The process and its supervisor both map it.

    Args:
        path: path of a page that another process has made; None: make a new page, with a lease that never ends.

    Raises:
        OSError: the page cannot be made or opened.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file: MemoryFile | None = None
        if path is None:
            page = _FIELDS.pack(float("inf"), _NOTHING, 0, 0, 0, 0)
            self._file = MemoryFile("moevement-status", page)
            path = self._file.path
        self.path = str(path)
        """Path at which another process opens the page."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, _FIELDS.size)
            self._words = memoryview(self._memory).cast("q")
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the page's file if this object has made it. Processes that have mapped the page keep the memory."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # Methods for the supervisor

    def hold_until(self, boot_time_s: float) -> None:
        """Set the end of the process's lease, in seconds of the boot-time clock."""
        struct.pack_into("<d", self._memory, 0, boot_time_s)

    def ask_to_wind_down(self) -> None:
        """Ask the process to end its job at the next boundary between iterations."""
        struct.pack_into("<q", self._memory, _WINDS_DOWN, 1)

    def set_waiting(self, *, waits: bool) -> None:
        """Tell a process that has just been started to idle (``waits``), or else to run its script."""
        struct.pack_into("<q", self._memory, _WAITS, waits)

    def ask_to_leave(self, iteration: int | None, turn: int = 0) -> None:
        """Ask the process to give its rank back after ``iteration``; None: take the request back.

        Args:
            iteration: iteration after which the process leaves.
            turn: number of processes of the node that leave before this one if they have no peer on another node.
        """
        leaves = 0 if iteration is None else iteration + 1
        if (leaves, turn) != (self._words[_LEAVES], self._words[_TURN]):
            self._words[_TURN] = turn
            self._words[_LEAVES] = leaves

    @property
    def committed(self) -> int | None:
        """Newest iteration that the process has committed; None before the first."""
        iteration = int(struct.unpack_from("<q", self._memory, _COMMITTED)[0])
        return None if iteration == _NOTHING else iteration

    # Methods for the process

    def commit(self, iteration: int) -> None:
        """Report the newest iteration that this process has committed."""
        struct.pack_into("<q", self._memory, _COMMITTED, iteration)

    @property
    def is_winding_down(self) -> bool:
        """True if the job is to end at the next boundary between iterations."""
        return bool(struct.unpack_from("<q", self._memory, _WINDS_DOWN)[0])

    @property
    def is_waiting(self) -> bool:
        """True if this new process is to idle before it runs its script, to leave the processors to a recovery."""
        return bool(struct.unpack_from("<q", self._memory, _WAITS)[0])

    def leaves_after(self, iteration: int) -> bool:
        """Return True if this process is to give its rank back now that it has committed ``iteration``."""
        return 0 < self._words[_LEAVES] <= iteration + 1

    @property
    def leaving_before(self) -> int:
        """Number of processes of the node that leave before this one if they have no peer on another node."""
        return self._words[_TURN]

    @property
    def is_held(self) -> bool:
        """True if the lease of this process has not run out, so that no other process can have its rank."""
        return boot_time_s() < float(struct.unpack_from("<d", self._memory, 0)[0])


_page: StatusPage | None = None


def own_page() -> StatusPage | None:
    """Return the page that this process shares with its supervisor; None without a supervisor."""
    global _page
    if _page is None and (path := os.environ.get(PAGE_ENV)):
        _page = StatusPage(path)
    return _page


def wait_until_held() -> None:
    """Block while the lease of this process has run out.

    The process calls this before every effect that other processes see: an update, a manifest, a line of metrics. Once
    the lease has run out, a replacement may have the process's rank. While the process waits here, its supervisor
    renews the lease or kills the process.
    """
    page = own_page()
    while page is not None and not page.is_held:
        time.sleep(POLL_S)


def is_asked_to_end() -> bool:
    """Return True if the supervisor of this process has asked the job to end after an iteration.

    SIGTERM to a launcher, or Slurm's signal before the time limit, sets this flag. In each iteration, a reduction tells
    all ranks if it is set on any node, so that all end after the same iteration (``Binding.plan_exit``).
    """
    page = own_page()
    return page is not None and page.is_winding_down
