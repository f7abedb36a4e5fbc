"""Detector of hangs in a job without spares. No process replaces a rank that hangs there, so the user has to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from moevement_core.launching.children import Child
from moevement_core.run.run_record import RunRecord

LOOK_S = 1.0
"""Seconds between two checks of the processes and of the metrics file."""
STOPPED_S = 15.0
"""Seconds for which a process has to be stopped (SIGSTOP) before the launcher reports it to the user."""
SILENT_S = 60.0
"""Seconds without a new line in the metrics file after which the launcher reports a hang. If iterations are slow,
:data:`SILENT_ITERATIONS` gives a longer time, which then counts."""
SILENT_ITERATIONS = 20
"""Time without a new line in the metrics file after which the launcher reports a hang, as a multiple of the longest
iteration so far. If :data:`SILENT_S` is longer, that time counts instead."""


class HangDetector:
    """Detector of stopped ranks (SIGSTOP) and of jobs in which no iteration ends any more. It reports each hang once.

    Args:
        children: the processes of the ranks, in the order of ranks.
        record: record of the run; None: only stopped ranks are detected.
        say: called with a line of text for the user.
        clock: returns monotonic seconds.
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
        """Value of the clock in seconds when the metrics file last grew; None: it has not grown since the start."""
        self._longest_s, self._is_told = 0.0, False
        self._used = self._used_now()

    def look(self) -> None:
        """Check for stopped ranks and for a hang, at most once a second; the launcher calls this in its loop."""
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
                    f"for this rank; kill -CONT {child.pid} lets the rank continue"
                )

    def _look_at_record(self, now: float) -> None:
        if (size := self._size_now()) != self._size:
            self._size = size
            if self._changed_at is not None and not self._is_told:  # Do not count a hang as an iteration.
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
            f"no iteration has ended for {silent_s:.0f} s; processor use since then: {shares}; to print the "
            "stacks of a rank into its log, run kill -USR1 PID"
        )

    def _size_now(self) -> int | None:
        if self._record is None:
            return None
        try:
            return self._record.metrics_path.stat().st_size
        except OSError:
            return None

    def _used_now(self) -> list[float]:
        """Return the processor time in seconds that each rank has used so far."""
        used = [0.0] * len(self._children)
        for rank, child in enumerate(self._children):
            with suppress(psutil.Error):
                used[rank] = sum(psutil.Process(child.pid).cpu_times()[:2])
        return used
