"""Content of every snapshot, through every change of schedules (``GenerateSchedule()`` of MoEvement's Algorithm 1).

``SS_t`` is the snapshot of ``state@t``. A :class:`Schedule` says of each iteration what its snapshot holds, if one is
taken at all; strategies make them (:mod:`moevement_core.strategies`). A :class:`ScheduleHistory` strings schedules
together: a new one begins where a window of the old one would, so windows stay whole, and every snapshot can be told
from its iteration alone.
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
    """Kinds of an operator's state in a snapshot."""

    NOTHING = 0
    COMPUTE = 1
    FULL = 2
    GRADIENT = 3
    """Gradients that the update to this iteration's state was made from."""
    OMITTED = 4
    """Nothing: a recovery takes the newest older version, and the updates since are lost."""


Contents = npt.NDArray[np.int8]
"""Content of a snapshot for each operator of the table, :class:`Saved` as int8 ``[operators]``."""

LAG_ALLOWANCE = 2
"""Iterations by which peers may trail before a window has to be abandoned: buffers are set aside for so many."""
LATE_AT_PEERS = 1
"""Iterations by which peers free snapshots late: ranks learn a little later of what a quiet iteration holds up.
Peers set buffers aside for so many."""


@dataclass(frozen=True, eq=False)
class Schedule(ABC):
    """Schedule of snapshots from ``start`` on, repeated in windows. Plain data: ranks that agree on
    it save the same.
    """

    table: OperatorTable
    start: int = field(default=0, kw_only=True)
    """The iteration whose state the first snapshot holds."""

    @property
    @abstractmethod
    def id(self) -> str:
        """A name that only equal schedules share, whatever rank made them; it travels with every snapshot."""

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
        """Iterations whose snapshots are captured at once where a job starts."""
        return self.size

    @property
    @abstractmethod
    def is_dense(self) -> bool:
        """True if each snapshot holds the full state of every operator."""

    @property
    def reorders(self) -> bool:
        """True if a schedule of the same size may follow that saves operators in another order."""
        return True

    @abstractmethod
    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return what snapshots of ``slot`` hold of each operator; None if none is captured in it."""

    supersedes: ClassVar[bool] = False
    """True if parts of a snapshot become useless before all of it does."""

    def superseded(self, slot: int, later: int) -> npt.NDArray[np.bool_]:
        """Return the operators of a snapshot of ``slot`` that are not needed once the ``later`` slots after it are
        persisted, bool ``[operators]``.

        What an update was made from is of no use where the full state after it is there.
        """
        contents = self.contents_of_slot(slot)
        assert contents is not None
        saved = [self.contents_of_slot((slot + step) % self.size) for step in range(1, later + 1)]
        newer = [contents == Saved.FULL for contents in saved if contents is not None]
        return (contents == Saved.GRADIENT) & np.logical_or.reduce([np.zeros(len(contents), dtype=bool), *newer])

    def on_disk_of_slot(self, slot: int) -> Contents | None:
        """Return what is written to disk of a snapshot of ``slot``; None: all of it."""
        return None

    @abstractmethod
    def last_of_run(self, first: int) -> int:
        """The last snapshot of the run that begins with ``SS_first``, where no other schedule comes between."""

    @abstractmethod
    def may_begin_at(self, iteration: int) -> bool:
        """Return whether a run may begin with ``SS_iteration``, after some that were left out."""

    @abstractmethod
    def slots_kept(self, lag: int, *, to_disk: bool) -> int:
        """Snapshots of itself that a rank keeps at most.

        Args:
            lag: iterations by which replication may trail.
            to_disk: whether one run more is kept, that is being written while newer ones come.
        """

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Snapshots that a rank keeps while nothing breaks: room for more is made when it is needed."""
        return self.slots_kept(lag, to_disk=to_disk)

    @abstractmethod
    def iterations_logged(self, lag: int, *, to_disk: bool) -> int:
        """Return how many iterations logs and records reach back at most: no plan begins before the oldest snapshot
        that is kept.
        """

    def iterations_logged_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Return how many iterations they reach back while nothing breaks."""
        return self.iterations_logged(lag, to_disk=to_disk)

    def replayed_after(self, run: tuple[int, int]) -> int:
        """The iteration after which a recovery from a run, its first and last snapshot, runs iterations again."""
        return run[0]

    @abstractmethod
    def most_replayed(self, lag: int) -> int:
        """Committed iterations that a recovery replays at most.

        Args:
            lag: L, iterations by which replication trails capture. When ``state@T`` is the last one committed,
                ``SS_(T-1)`` is captured (``SS_T`` is still being copied), so ``SS_(T-1-L)`` is the newest that peers
                may have.
        """

    @abstractmethod
    def expected_rollback(self, lag: float) -> float:
        """Iterations of work that a failure at a random moment costs on average, the interrupted one half."""

    @abstractmethod
    def with_windows_of(self, other: Schedule) -> Schedule:
        """These operators, saved when ``other`` saves those of another stage."""

    @abstractmethod
    def starting_at(self, start: int) -> Schedule:
        """The same from another iteration on."""

    def digested_once_a_window(self, iteration: int) -> Sequence[str]:
        """The operators of whose whole state ``SS_iteration`` has a digest, where each has one in a window.

        All of them where a replay of the window has brought every operator back.
        """
        return self.table.names if iteration == self.last_of_run(self.window_start(iteration)) else ()

    def slot(self, iteration: int) -> int:
        """The slot that ``SS_iteration`` saves.

        Raises:
            ScheduleError: the schedule is not yet in force then.
        """
        if iteration < self.start:
            raise ScheduleError(f"iteration {iteration}: this schedule begins at {self.start}; ask the one before it")
        return (iteration - self.start) % self.size

    def window_start(self, iteration: int) -> int:
        """The first iteration of the window that ``SS_iteration`` belongs to."""
        return iteration - self.slot(iteration)

    def decided_at(self, iteration: int) -> int:
        """The last iteration, ``iteration`` or earlier, at which ranks decide anew what comes."""
        return self.window_start(iteration)

    def next_boundary(self, iteration: int) -> int:
        """The first iteration, ``iteration`` or later, whose snapshot begins a window."""
        return max(self.start, iteration + (self.start - iteration) % self.size)

    def contents(self, iteration: int) -> Contents | None:
        """Return what ``SS_iteration`` holds of each operator; None if it is not captured."""
        return self.contents_of_slot(self.slot(iteration))

    def slots(self) -> list[int]:
        """Return the slots of a window in which a snapshot is captured."""
        return [slot for slot in range(self.size) if self.contents_of_slot(slot) is not None]


def is_other_window(new: Schedule, old: Schedule) -> bool:
    """Return whether windows of ``new`` hold or take something else than those of ``old``, whatever their order."""
    return (new.size, new.snapshots, type(new)) != (old.size, old.snapshots, type(old))


class ScheduleHistory:
    """The schedules of a run, each in force until the next begins.

    All ranks of a job change theirs at the same boundary; what a change needs to be agreed on is its order and window,
    where it begins follows.
    """

    def __init__(self, first: Schedule, *later: Schedule) -> None:
        self._schedules = [first, *later]

    @property
    def all(self) -> tuple[Schedule, ...]:
        """Schedules that are remembered, the oldest first."""
        return tuple(self._schedules)

    @property
    def newest(self) -> Schedule:
        """The last schedule decided on, in force or about to be."""
        return self._schedules[-1]

    @property
    def oldest(self) -> Schedule:
        """The first schedule that is remembered."""
        return self._schedules[0]

    def at(self, iteration: int) -> Schedule:
        """The schedule under which ``SS_iteration`` is taken.

        Raises:
            ScheduleError: the iteration is before the first schedule that is remembered.
        """
        if (index := self._index(iteration)) < 0:
            first = self._schedules[0].start
            raise ScheduleError(f"iteration {iteration}: schedules are known from {first} on; the older are forgotten")
        return self._schedules[index]

    def since(self, iteration: int) -> tuple[Schedule, ...]:
        """Return those that ``SS_iteration`` and later ones are taken under, the oldest first."""
        return tuple(self._schedules[max(0, self._index(iteration)) :])

    def contents(self, iteration: int) -> Contents | None:
        """Return what ``SS_iteration`` holds of each operator; None if it is not captured."""
        return self.at(iteration).contents(iteration)

    def change(self, now: int, to: Schedule) -> Schedule:
        """Another schedule from the first window on that begins after ``SS_now``; returns it as it starts there.

        A change that was decided on and has not begun yet is replaced.
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
        """Drop the schedules that no snapshot from ``iteration`` on was taken under."""
        keep = self._schedules.index(self.at(iteration))
        del self._schedules[:keep]

    def _index(self, iteration: int) -> int:
        return bisect_right(self._schedules, iteration, key=lambda schedule: schedule.start) - 1
