"""Which operators every snapshot holds (``GenerateSchedule()`` of MoEvement's Algorithm 1), through reorders and new W.

``SS_t`` is the snapshot of ``state@t``. Under one :class:`Schedule` it saves slot ``(t - start) mod W``: full state of
the slot's operators, compute weights of those in later slots (aligned) or of all others (rolling). A
:class:`ScheduleHistory` strings schedules together: a new one begins where a window of the old one would, so windows
stay whole, and every snapshot can be told from its iteration alone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ScheduleError
from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Order
from moevement_core.policy.window import Window, WindowKind


class Saved(IntEnum):
    """What a snapshot holds of an operator."""

    NOTHING = 0
    COMPUTE = 1
    FULL = 2


Contents = npt.NDArray[np.int8]
"""What a snapshot holds of each operator of the table, :class:`Saved` as int8 ``[operators]``."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """One order and one window, in force from ``start`` on. Plain data: ranks that agree on it save the same."""

    table: OperatorTable
    order: Order
    window: Window
    start: int = 0
    """The iteration whose state the first snapshot holds."""

    @property
    def size(self) -> int:
        """W, iterations."""
        return self.window.size

    @cached_property
    def id(self) -> str:
        """A name that only equal schedules share, whatever rank made them; it travels with every snapshot."""
        digest = hashlib.sha256(repr((self.start, self.window.kind.value, self.window.ends)).encode())
        digest.update("\n".join(self.table.names[place] for place in self.order).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def slot_of_operator(self) -> npt.NDArray[np.int64]:
        """The slot in which each operator of the table saves its full state, int64 ``[operators]``."""
        slots = np.empty(len(self.table), dtype=np.int64)
        slots[self.order] = np.searchsorted(self.window.ends, np.arange(len(self.table)), side="right")
        return slots

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

    def next_boundary(self, iteration: int) -> int:
        """The first iteration, ``iteration`` or later, whose snapshot begins a window."""
        return max(self.start, iteration + (self.start - iteration) % self.size)

    def active(self, slot: int) -> tuple[str, ...]:
        """Operators that save full state in ``slot``, in order."""
        start = self.window.ends[slot - 1] if slot else 0
        return tuple(self.table.names[place] for place in self.order[start : self.window.ends[slot]])

    def frozen(self, slot: int) -> tuple[str, ...]:
        """Operators that save compute weights in ``slot``, in order: later ones (aligned) or all others (rolling)."""
        start = self.window.ends[slot - 1] if slot and self.window.kind is WindowKind.ROLLING else 0
        others = self.order[:start], self.order[self.window.ends[slot] :]
        return tuple(self.table.names[place] for part in others for place in part)

    def contents(self, iteration: int) -> Contents:
        """What ``SS_iteration`` holds of each operator."""
        slot = self.slot(iteration)
        saved = np.zeros(len(self.table), dtype=np.int8)
        frozen = self.slot_of_operator > slot if self.window.kind is WindowKind.ALIGNED else True
        saved[frozen] = Saved.COMPUTE
        saved[self.slot_of_operator == slot] = Saved.FULL
        return saved

    def snapshot_bytes(self, iteration: int) -> npt.NDArray[np.int64]:
        """What ``SS_iteration`` weighs on each rank of the table, int64 ``[ranks]``."""
        return self.window.slot_bytes[:, self.slot(iteration)]


class ScheduleHistory:
    """The schedules of a run, each in force until the next begins.

    All ranks of a job change theirs at the same boundary; what a change needs to be agreed on is its order and window,
    where it begins follows.
    """

    def __init__(self, first: Schedule, *later: Schedule) -> None:
        self._schedules = [first, *later]

    @property
    def all(self) -> tuple[Schedule, ...]:
        """Those that are remembered, the oldest first."""
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
        index = bisect_right(self._schedules, iteration, key=lambda schedule: schedule.start) - 1
        if index < 0:
            first = self._schedules[0].start
            raise ScheduleError(f"iteration {iteration}: schedules are known from {first} on; the older are forgotten")
        return self._schedules[index]

    def contents(self, iteration: int) -> Contents:
        """What ``SS_iteration`` holds of each operator."""
        return self.at(iteration).contents(iteration)

    def change(self, now: int, order: Order, window: Window) -> Schedule:
        """A new order, a new window or both, from the first window on that begins after ``SS_now``.

        A change that was decided on and has not begun yet is replaced.
        """
        while len(self._schedules) > 1 and self.newest.start > now:
            self._schedules.pop()
        old = self.newest
        new = Schedule(old.table, order, window, start=old.next_boundary(now + 1))
        if new.start == old.start:  # the old one never came into force
            self._schedules.pop()
        self._schedules.append(new)
        return new

    def forget_before(self, iteration: int) -> None:
        """Drop the schedules that no snapshot from ``iteration`` on was taken under."""
        keep = self._schedules.index(self.at(iteration))
        del self._schedules[:keep]


LAG_ALLOWANCE = 2
"""Iterations by which peers may trail before a window has to be abandoned: buffers are set aside for so many."""


def slots_kept(size: int, lag: int, *, to_disk: bool = False) -> int:
    """Snapshots of itself that a rank keeps at most: a persisted run, the next one, one being copied, and the lag.

    With ``to_disk`` one run more, that is being written while newer ones come.

    Rolling windows need as many as aligned ones. While nothing breaks W + 1 would do; but after a reorder, or when a
    snapshot is lost, the next run is W new snapshots beside the W that are persisted.
    """
    return (3 if to_disk else 2) * size + 1 + lag


def iterations_logged(size: int, lag: int, *, to_disk: bool = False) -> int:
    """How far back logs and records reach at most: no plan begins before the oldest snapshot that buffers may hold.

    One window more is for one that was abandoned, whose place the next takes late; and one iteration is under way.
    """
    return slots_kept(size, lag, to_disk=to_disk) + size + 1


def most_replayed(kind: WindowKind, size: int, lag: int) -> int:
    """Committed iterations that a recovery replays at most.

    Args:
        kind: of the window.
        size: W.
        lag: L, iterations by which replication trails capture. When ``state@T`` is the last one committed, ``SS_(T-1)``
            is captured (``SS_T`` is still being copied), so ``SS_(T-1-L)`` is the newest that peers have.
    """
    return lag + (2 * size - 1 if kind is WindowKind.ALIGNED else size)


def expected_rollback(kind: WindowKind, size: int, lag: float) -> float:
    """Iterations of work that a failure at a random moment costs on average, the interrupted one half.

    Without lag the aligned one is the paper's 3/2 W (section 3.6).
    """
    return lag + (1.5 * size if kind is WindowKind.ALIGNED else size + 0.5)
