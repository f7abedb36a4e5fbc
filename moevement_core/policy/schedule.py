"""Content of every snapshot of a training run (``GenerateSchedule()`` of MoEvement's Algorithm 1).

``SS_t`` is the snapshot of ``state@t``. A :class:`Schedule` gives the content of the snapshot of each iteration, or
None for an iteration without a snapshot. Strategies make schedules (:mod:`moevement_core.strategies`). A
:class:`ScheduleHistory` holds the schedules of a training run. A new schedule begins where a window of the old one
would begin, so windows stay whole. The history and the iteration of a snapshot determine its content.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import ClassVar, NamedTuple

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
    """Nothing, but a recovery may restore the operator from the newest older snapshot that has it. The operator's later
    updates are then lost."""


Contents = npt.NDArray[np.int8]
"""Content of a snapshot for each operator of the table, :class:`Saved` as int8 ``[operators]``."""

LAG_ALLOWANCE = 2
"""Iterations by which copies at peers may lag before a window is abandoned. Ranks allocate memory for this lag."""
LATE_AT_PEERS = 1
"""Number of iterations by which peers may free a snapshot late. Peers allocate memory for this delay. Its cause is a
quiet iteration, in which sends pause: ranks then agree later than usual on the snapshots that may be freed."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotParts:
    """Parts of a snapshot; None stands for the whole snapshot."""

    on_disk: Contents | None = None
    """Part that is written to disk."""
    at_peers: Contents | None = None
    """Part that peers receive."""


class Retention(NamedTuple):
    """Numbers of snapshots and iterations for which a rank may have to allocate host memory."""

    slots: int
    """Largest number of its own snapshots that a rank keeps."""
    slots_at_first: int
    """Number of its own snapshots that a rank keeps as long as nothing fails.

    A rank allocates memory for more snapshots only when it needs them.
    """
    logged: int
    """Largest number of iterations for which boundary logs and boundary records are kept.

    Logs and records reach back to the oldest kept snapshot, because no recovery begins before that snapshot.
    """
    logged_at_first: int
    """Number of iterations for which boundary logs and records are kept as long as nothing fails."""
    for_disk: int = 0
    """Number of its own snapshots that a rank keeps because the newest window on disk leaves out operators."""


class Cadence(NamedTuple):
    """Numbers of iterations from one event of a schedule to the next one of its kind."""

    run: int
    """Iterations from the first snapshot of a recoverable run to its last one, both included."""
    run_start: int
    """Iterations from one snapshot that may begin a recoverable run to the next, if earlier snapshots are missing."""
    decision: int
    """Iterations from one decision on what later snapshots hold to the next; a new schedule may begin at each."""
    reach: int
    """Iterations before a job's first one. The job captures its first state as the snapshots of these iterations."""


class Rollback(NamedTuple):
    """Iterations that a failure costs."""

    mean: float
    """Mean for a failure at a random moment, with half an iteration for the interrupted one."""
    most: int
    """Largest number of committed iterations that a recovery replays."""


@dataclass(frozen=True, eq=False)
class Schedule(ABC):
    """Schedule of snapshots from ``start`` on, repeated in windows.

    A schedule is plain data. Ranks with equal schedules save equal parts of the state.
    """

    table: OperatorTable
    start: int = field(default=0, kw_only=True)
    """Iteration whose state the first snapshot holds."""

    @property
    @abstractmethod
    def id(self) -> str:
        """Identifier of the schedule: the same on all ranks for equal schedules, and different for unequal ones.

        Every snapshot carries this identifier.
        """

    @property
    @abstractmethod
    def size(self) -> int:
        """Iterations from the beginning of a window to the beginning of the next one."""

    @property
    @abstractmethod
    def snapshots(self) -> int:
        """Number of snapshots in a window."""

    @property
    @abstractmethod
    def cadence(self) -> Cadence:
        """Iterations between the events of the schedule: runs, decisions, and the beginning of the job."""

    @property
    @abstractmethod
    def is_dense(self) -> bool:
        """True if each snapshot holds the full state of every operator."""

    @abstractmethod
    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return the content of the snapshots of ``slot`` for each operator; None if the slot has no snapshot."""

    supersedes: ClassVar[bool] = False
    """True if ranks may free parts of a snapshot before the rest; see :func:`superseded_in`."""
    restores_last: ClassVar[bool] = False
    """True if a recovery restores the state of a run's last snapshot, and so executes only later iterations again."""

    def parts_of_slot(self, slot: int) -> SnapshotParts:
        """Return the parts of a snapshot of ``slot`` that are written to disk and sent to peers."""
        return SnapshotParts()

    @abstractmethod
    def retention(self, lag: int, *, to_disk: bool = False) -> Retention:
        """Return for how many iterations a rank keeps snapshots and logs.

        Args:
            lag: iterations by which copies at peers may lag.
            to_disk: True if a rank also keeps a recoverable run that is being written to disk.
        """

    @abstractmethod
    def rollback(self, lag: float) -> Rollback:
        """Return how many iterations a failure costs.

        Args:
            lag: L, iterations by which replication trails capture. When ``state@T`` is the last committed state,
                ``SS_(T-1)`` is captured and ``SS_T`` is still being copied to the host. The newest snapshot that peers
                are sure to have is then ``SS_(T-1-L)``.
        """

    def for_operators_of(self, other: Schedule) -> Schedule:
        """Return this schedule, but with the operators of ``other``, a schedule of another stage."""
        return replace(self, table=other.table)

    def digested_once_a_window(self, iteration: int) -> Sequence[str]:
        """Return the operators whose whole state gets a digest in ``SS_iteration``.

        The caller asks only if the user wants one digest of each operator in a window. By default the last snapshot of
        a window has all these digests, because a replay of the window has restored all operators by then.
        """
        return self.table.names if self.slot(iteration) == self.cadence.run - 1 else ()

    def slot(self, iteration: int) -> int:
        """Return the slot of ``SS_iteration``: the number of its iteration within the window, counted from 0.

        Raises:
            ScheduleError: the schedule begins after ``iteration``.
        """
        if iteration < self.start:
            raise ScheduleError(
                f"iteration {iteration} is before iteration {self.start}, where this schedule begins; use an older "
                "schedule"
            )
        return (iteration - self.start) % self.size


def schedule_id(names: Sequence[str], *fields: object) -> str:
    """Return a digest of a schedule's operator names and of its other fields, 16 hexadecimal digits."""
    digest = hashlib.sha256(repr(fields).encode())
    digest.update("\n".join(names).encode())
    return digest.hexdigest()[:16]


def slots_with_snapshot(schedule: Schedule) -> list[int]:
    """Return the slots of a window in which a snapshot is captured."""
    return [slot for slot in range(schedule.size) if schedule.contents_of_slot(slot) is not None]


def superseded_in(schedule: Schedule, slot: int, later: int) -> npt.NDArray[np.bool_]:
    """Return the operators whose gradients in a snapshot are useless once later snapshots are persisted.

    No recovery needs an operator's gradients if a later persisted snapshot has the operator's full state.

    Args:
        schedule: schedule of the snapshots.
        slot: slot of the snapshot with the gradients.
        later: number of snapshots after it that are persisted.

    Returns:
        Mask of these operators, bool ``[operators]``.
    """
    contents = schedule.contents_of_slot(slot)
    assert contents is not None
    saved = [schedule.contents_of_slot((slot + step) % schedule.size) for step in range(1, later + 1)]
    newer = [contents == Saved.FULL for contents in saved if contents is not None]
    return (contents == Saved.GRADIENT) & np.logical_or.reduce([np.zeros(len(contents), dtype=bool), *newer])


def last_of_run(schedule: Schedule, first: int) -> int:
    """Return the last iteration of the recoverable run that begins with ``SS_first``.

    The result holds only if the schedule stays in force up to that iteration.
    """
    return first + schedule.cadence.run - 1


def decided_at(schedule: Schedule, iteration: int) -> int:
    """Return the iteration, up to ``iteration``, of the last decision on what later snapshots hold."""
    return iteration - (iteration - schedule.start) % schedule.cadence.decision


def next_boundary(schedule: Schedule, iteration: int) -> int:
    """Return the first iteration from ``iteration`` on at which a new schedule may begin."""
    return max(schedule.start, iteration + (schedule.start - iteration) % schedule.cadence.decision)


def is_other_window(new: Schedule, old: Schedule) -> bool:
    """Return True if the windows of two schedules differ in size, number of snapshots or strategy.

    A difference in the order of operators does not matter.
    """
    return (new.size, new.snapshots, type(new)) != (old.size, old.snapshots, type(old))


class ScheduleHistory:
    """History of the schedules of a training run. Each schedule is in force until the next one begins.

    All ranks of a job change schedules at the same window boundary. The ranks agree only on the new order and window.
    Each rank then computes the iteration of the change by itself.
    """

    def __init__(self, first: Schedule, *later: Schedule) -> None:
        self._schedules = [first, *later]

    @property
    def all(self) -> tuple[Schedule, ...]:
        """Schedules that the history still holds, the oldest first."""
        return tuple(self._schedules)

    @property
    def newest(self) -> Schedule:
        """Last schedule that was decided on; it may not have begun yet."""
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
            raise ScheduleError(f"iteration {iteration} is before iteration {first}, where the oldest schedule begins")
        return self._schedules[index]

    def since(self, iteration: int | None) -> tuple[Schedule, ...]:
        """Return the schedules under which ``SS_iteration`` and later snapshots are captured, the oldest first.

        If ``iteration`` is None, return all schedules.
        """
        first = 0 if iteration is None else max(0, self._index(iteration))
        return tuple(self._schedules[first:])

    def contents(self, iteration: int) -> Contents | None:
        """Return the content of ``SS_iteration`` for each operator; None if it is not captured."""
        schedule = self.at(iteration)
        return schedule.contents_of_slot(schedule.slot(iteration))

    def takes(self, iteration: int) -> bool:
        """Return True if there is a snapshot ``SS_iteration`` under the schedules that the history still holds."""
        return iteration >= self.oldest.start and self.contents(iteration) is not None

    def change(self, now: int, to: Schedule) -> Schedule:
        """Let the schedule ``to`` begin at the first window boundary after ``SS_now``, and return that new schedule.

        The new schedule replaces any schedule that was decided on earlier and has not begun.
        """
        while len(self._schedules) > 1 and self.newest.start > now:
            self._schedules.pop()
        old = self.newest
        new = replace(to, start=next_boundary(old, now + 1))
        if new.start == old.start:  # the old one never came into force
            self._schedules.pop()
        self._schedules.append(new)
        return new

    def forget_before(self, iteration: int) -> None:
        """Drop the schedules that ended before ``iteration``."""
        keep = self._schedules.index(self.at(iteration))
        del self._schedules[:keep]

    def _index(self, iteration: int) -> int:
        return bisect_right(self._schedules, iteration, key=lambda schedule: schedule.start) - 1
