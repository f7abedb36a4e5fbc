"""Whether a job without spares goes on: nobody replaces a rank that hangs, but it should be said, and which."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from moevement_core.launching.children import Child
from moevement_core.run_record import RunRecord

LOOK_S = 1.0
STOPPED_S = 15.0
"""After which a process that somebody has stopped is reported."""
SILENT_S = 60.0
"""After which nothing new in the record is reported, and ..."""
SILENT_ITERATIONS = 20
"""... not before so many iterations would have ended."""


class Silence:
    """Looks at the ranks of a job, and says once when one is stopped, and once when no iteration ends any more.

    Args:
        children: the ranks, in their order.
        record: of the run; None: iterations are not seen.
        say: called with a line.
        clock: seconds.
    """

    def __init__(
        self,
        children: Sequence[Child],
        record: RunRecord | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children, self._record, self._say, self._clock = children, record, say, clock
        self._due = clock() + LOOK_S
        self._stopped_since: dict[int, float] = {}
        self._told = set[int]()
        self._size: int | None = self._size_now()
        self._changed_at: float | None = None
        """When the record grew last; None: not since this began."""
        self._longest_s, self._is_told = 0.0, False
        self._used = self._used_now()

    def look(self) -> None:
        """Called often; does something once a second."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + LOOK_S
        self._look_for_stopped(now)
        self._look_at_record(now)

    def _look_for_stopped(self, now: float) -> None:
        for rank, child in enumerate(self._children):
            if not child.is_stopped():
                self._stopped_since.pop(rank, None)
                self._told.discard(rank)
                continue
            since = self._stopped_since.setdefault(rank, now)
            if now - since >= STOPPED_S and rank not in self._told:
                self._told.add(rank)
                self._say(
                    f"rank {rank} (pid {child.pid}) has been stopped for {now - since:.0f} s, and the job waits "
                    f"for it; kill -CONT {child.pid} lets it go on"
                )

    def _look_at_record(self, now: float) -> None:
        if (size := self._size_now()) != self._size:
            self._size = size
            if self._changed_at is not None and not self._is_told:  # a hang is no measure of an iteration
                self._longest_s = max(self._longest_s, now - self._changed_at)
            self._changed_at, self._is_told, self._used = now, False, self._used_now()
            return
        if self._changed_at is None or self._is_told or self._stopped_since:
            return
        silent_s = now - self._changed_at
        if silent_s < max(SILENT_S, SILENT_ITERATIONS * self._longest_s):
            return
        self._is_told = True
        used = self._used_now()
        shares = ", ".join(
            f"rank {rank} (pid {child.pid}) {(used[rank] - self._used[rank]) / silent_s:.0%}"
            for rank, child in enumerate(self._children)
        )
        self._say(
            f"no iteration has ended for {silent_s:.0f} s; of a processor, ranks have used since: {shares}. What one "
            "of them does kill -USR1 PID prints into its log"
        )

    def _size_now(self) -> int | None:
        if self._record is None:
            return None
        try:
            return self._record.metrics_path.stat().st_size
        except OSError:
            return None

    def _used_now(self) -> list[float]:
        """Seconds of processors of each rank so far."""
        used = [0.0] * len(self._children)
        for rank, child in enumerate(self._children):
            with suppress(psutil.Error):
                used[rank] = sum(psutil.Process(child.pid).cpu_times()[:2])
        return used
