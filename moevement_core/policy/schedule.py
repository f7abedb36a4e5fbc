"""Content of every snapshot, through every change of schedules (``GenerateSchedule()`` of MoEvement's Algorithm 1).

``SS_t`` is the snapshot of ``state@t``. A :class:`Schedule` gives the content of each iteration's snapshot, or says
that none is taken; strategies make schedules (:mod:`moevement_core.strategies`). A :class:`ScheduleHistory` holds the
schedules of a run. A new schedule begins where a window of the old one would begin, so windows stay whole. The content
of every snapshot follows from its iteration alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ScheduleError
from moevement_core.operators import OperatorTable


class Saved(IntEnum):
    """Kind of an operator's state in a snapshot."""

    NOTHING = 0
    COMPUTE = 1
    FULL = 2
    GRADIENT = 3
    """Gradients of the update that led to this iteration's state."""
    OMITTED = 4
    """Nothing, but a recovery may take the newest older version; the updates since then are lost."""


Contents = npt.NDArray[np.int8]
"""Content of a snapshot for each operator of the table, :class:`Saved` as int8 ``[operators]``."""

LAG_ALLOWANCE = 2
"""Iterations by which peers may trail before a window is abandoned; memory is allocated for so many."""
LATE_AT_PEERS = 1
"""Iterations by which peers free snapshots late, for which they allocate memory. A quiet iteration delays the agreement
of ranks on what may be freed."""


@dataclass(frozen=True, eq=False)
class Schedule(ABC):
    """Schedule of snapshots from ``start`` on, repeated in windows.

    It is plain data: ranks that agree on a schedule save the same.
    """

    table: OperatorTable
    start: int = field(default=0, kw_only=True)
    """Iteration whose state the first snapshot holds."""

    @property
    @abstractmethod
    def id(self) -> str:
        """Name that only equal schedules share, on any rank; it travels with every snapshot."""

    @property
    @abstractmethod
    def size(self) -> int:
        """W: iterations from the beginning of a window to that of the next."""

    @property
    @abstractmethod
    def snapshots(self) -> int:
        """Number of snapshots in a window."""

    @property
    def reach(self) -> int:
        """Iterations of snapshots that a job captures at once when it starts."""
        return self.size

    @property
    @abstractmethod
    def is_dense(self) -> bool:
        """True if each snapshot holds the full state of every operator."""

    @property
    def reorders(self) -> bool:
        """True if a schedule of the same size, with another order of operators, may follow."""
        return True

    @abstractmethod
    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return the content of snapshots of ``slot`` for each operator; None if none is captured in it."""

    supersedes: ClassVar[bool] = False
    """True if parts of a snapshot become useless before the whole snapshot does."""

    def superseded(self, slot: int, later: int) -> npt.NDArray[np.bool_]:
        """Return a mask of operators whose part of ``slot`` is useless once the next ``later`` slots are persisted.

        The mask is bool ``[operators]``. Gradients are useless once a later full state of the operator is persisted.
        """
        contents = self.contents_of_slot(slot)
        assert contents is not None
        saved = [self.contents_of_slot((slot + step) % self.size) for step in range(1, later + 1)]
        newer = [contents == Saved.FULL for contents in saved if contents is not None]
        return (contents == Saved.GRADIENT) & np.logical_or.reduce([np.zeros(len(contents), dtype=bool), *newer])

    def on_disk_of_slot(self, slot: int) -> Contents | None:
        """Return the part of a snapshot of ``slot`` that is written to disk; None: all of it."""
        return None

    @abstractmethod
    def last_of_run(self, first: int) -> int:
        """Return the last snapshot of the run that begins with ``SS_first``, if no other schedule begins in it."""

    @abstractmethod
    def may_begin_at(self, iteration: int) -> bool:
        """Return True if a run may begin with ``SS_iteration`` after earlier snapshots were left out."""

    @abstractmethod
    def slots_kept(self, lag: int, *, to_disk: bool) -> int:
        """Return the most own snapshots that a rank keeps.

        Args:
            lag: iterations by which replication may trail.
            to_disk: True if a rank also keeps a run that is being written to disk while newer ones are captured.
        """

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Return how many snapshots a rank keeps while nothing fails; memory for more is allocated on demand."""
        return self.slots_kept(lag, to_disk=to_disk)

    @abstractmethod
    def iterations_logged(self, lag: int, *, to_disk: bool) -> int:
        """Return how many iterations logs and records reach back at most.

        No recovery begins before the oldest snapshot that is kept.
        """

    def iterations_logged_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Return how many iterations logs and records reach back while nothing fails."""
        return self.iterations_logged(lag, to_disk=to_disk)

    def replayed_after(self, run: tuple[int, int]) -> int:
        """Return the iteration after which a recovery executes iterations again.

        Args:
            run: first and last snapshot of the run that the recovery loads.
        """
        return run[0]

    @abstractmethod
    def most_replayed(self, lag: int) -> int:
        """Return the most committed iterations that a recovery replays.

        Args:
            lag: L, iterations by which replication trails capture. When ``state@T`` is the last one committed,
                ``SS_(T-1)`` is captured and ``SS_T`` is still being copied. So ``SS_(T-1-L)`` is the newest that peers
                may have.
        """

    @abstractmethod
    def expected_rollback(self, lag: float) -> float:
        """Return the mean iterations of work that a failure at a random moment costs.

        The interrupted iteration counts half.
        """

    @abstractmethod
    def with_windows_of(self, other: Schedule) -> Schedule:
        """Return this schedule's operators, saved when ``other`` saves the operators of another stage."""

    @abstractmethod
    def starting_at(self, start: int) -> Schedule:
        """Return the same schedule with another start."""

    def digested_once_a_window(self, iteration: int) -> Sequence[str]:
        """Return the operators whose whole state has a digest in ``SS_iteration``, if each has one digest in a window.

        These are all operators in the last snapshot of a window, because a replay of the window has restored all by
        then.
        """
        return self.table.names if iteration == self.last_of_run(self.window_start(iteration)) else ()

    def slot(self, iteration: int) -> int:
        """Return the slot that ``SS_iteration`` saves.

        Raises:
            ScheduleError: the schedule begins after ``iteration``.
        """
        if iteration < self.start:
            raise ScheduleError(f"iteration {iteration}: this schedule begins at {self.start}; ask the one before it")
        return (iteration - self.start) % self.size

    def window_start(self, iteration: int) -> int:
        """Return the first iteration of the window that ``SS_iteration`` belongs to."""
        return iteration - self.slot(iteration)

    def decided_at(self, iteration: int) -> int:
        """Return the last iteration, ``iteration`` or earlier, at which ranks decide what later snapshots hold."""
        return self.window_start(iteration)

    def next_boundary(self, iteration: int) -> int:
        """Return the first iteration, ``iteration`` or later, whose snapshot begins a window."""
        return max(self.start, iteration + (self.start - iteration) % self.size)

    def contents(self, iteration: int) -> Contents | None:
        """Return the content of ``SS_iteration`` for each operator; None if it is not captured."""
        return self.contents_of_slot(self.slot(iteration))

    def slots(self) -> list[int]:
        """Return the slots of a window in which a snapshot is captured."""
        return [slot for slot in range(self.size) if self.contents_of_slot(slot) is not None]


def is_other_window(new: Schedule, old: Schedule) -> bool:
    """Return True if windows of ``new`` differ from those of ``old`` in size, number of snapshots or strategy.

    The order of operators does not count.
    """
    return (new.size, new.snapshots, type(new)) != (old.size, old.snapshots, type(old))


class ScheduleHistory:
    """History of the schedules of a run, each in force until the next begins.

    All ranks of a job change schedules at the same boundary. They agree only on the new order and window; the iteration
    of the change follows.
    """

    def __init__(self, first: Schedule, *later: Schedule) -> None:
        self._schedules = [first, *later]

    @property
    def all(self) -> tuple[Schedule, ...]:
        """Schedules that the history still holds, the oldest first."""
        return tuple(self._schedules)

    @property
    def newest(self) -> Schedule:
        """Last schedule that was decided on, in force or about to be."""
        return self._schedules[-1]

    @property
    def oldest(self) -> Schedule:
        """First schedule that the history still holds."""
        return self._schedules[0]

    def at(self, iteration: int) -> Schedule:
        """Return the schedule under which ``SS_iteration`` is captured.

        Raises:
            ScheduleError: the iteration is before the first schedule that the history holds.
        """
        if (index := self._index(iteration)) < 0:
            first = self._schedules[0].start
            raise ScheduleError(f"iteration {iteration}: schedules are known from {first} on; the older are forgotten")
        return self._schedules[index]

    def since(self, iteration: int) -> tuple[Schedule, ...]:
        """Return the schedules under which ``SS_iteration`` and later snapshots are captured, the oldest first."""
        return tuple(self._schedules[max(0, self._index(iteration)) :])

    def contents(self, iteration: int) -> Contents | None:
        """Return the content of ``SS_iteration`` for each operator; None if it is not captured."""
        return self.at(iteration).contents(iteration)

    def change(self, now: int, to: Schedule) -> Schedule:
        """Return ``to`` with its start, after adding it from the first window that begins after ``SS_now``.

        It replaces a schedule that was decided on and has not begun.
        """
        while len(self._schedules) > 1 and self.newest.start > now:
            self._schedules.pop()
        old = self.newest
        new = to.starting_at(old.next_boundary(now + 1))
        if new.start == old.start:  # the old one never came into force
            self._schedules.pop()
        self._schedules.append(new)
        return new

    def forget_before(self, iteration: int) -> None:
        """Drop the schedules under which no snapshot from ``iteration`` on was captured."""
        keep = self._schedules.index(self.at(iteration))
        del self._schedules[:keep]

    def _index(self, iteration: int) -> int:
        return bisect_right(self._schedules, iteration, key=lambda schedule: schedule.start) - 1
