"""Common part of the schedules of MoC-System and MoEtion. A snapshot may leave out experts that older ones hold."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.policy.schedule import LAG_ALLOWANCE, Schedule
from moevement_core.snapshot.agreement import HORIZON

MOST_REACH = HORIZON // 2 - 2 * LAG_ALLOWANCE
"""Longest time in which the full state of every operator must be saved once, in iterations.

Ranks agree only on runs that began at most :data:`HORIZON` iterations ago. A run after a gap may be twice as long.
"""


@dataclass(frozen=True, eq=False)
class VersionSchedule(Schedule):
    """Schedule of a snapshot every ``interval`` iterations.

    Any :attr:`snapshots` consecutive snapshots hold the full state of every operator.
    """

    interval: int
    """Iterations from one snapshot to the next."""

    @property
    def reach(self) -> int:
        """Number of iterations in which the first snapshots of a job save every operator."""
        return self.snapshots * self.interval

    def next_boundary(self, iteration: int) -> int:
        """Return the iteration of the first snapshot, at ``iteration`` or later, whose experts can still be chosen."""
        return max(self.start, iteration + (self.start - iteration) % self.interval)

    def last_of_run(self, first: int) -> int:
        """Return the iteration of the last snapshot of the run that begins with ``SS_first``."""
        return first + (self.snapshots - 1) * self.interval

    def may_begin_at(self, iteration: int) -> bool:
        """Return True if ``SS_iteration`` is captured, because any snapshot may begin a run."""
        return (iteration - self.start) % self.interval == 0

    def decided_at(self, iteration: int) -> int:
        """Return the iteration of the newest snapshot. Tokens counted until then decide the next experts."""
        return iteration - (iteration - self.start) % self.interval

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """Return the most snapshots that a rank keeps: after a gap, a new run is kept beside the usual snapshots."""
        return self.snapshots + self.slots_at_first(lag, to_disk=to_disk)

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Return the number of snapshots that a rank keeps while nothing fails.

        These are the persisted run, the snapshots taken before all ranks know of a newer run, and a run that is being
        written to disk.
        """
        return self.snapshots * (1 + to_disk) + -(-(2 + lag) // self.interval)

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """Return the number of iterations that boundary logs hold, back to the newest persisted snapshot."""
        return 2 * self.interval + lag + 1

    def replayed_after(self, run: tuple[int, int]) -> int:
        """Return the iteration of the run's last snapshot; later iterations are executed again."""
        return run[1]

    def most_replayed(self, lag: int) -> int:
        """Return the most iterations that a recovery replays after the newest snapshot that peers have."""
        return lag + self.interval

    def expected_rollback(self, lag: float) -> float:
        """Return the mean rollback in iterations: the lag, half an interval, and one iteration for the copy."""
        return lag + self.interval / 2 + 1

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """Return no operators, because a recovery that lost updates rebuilds no state that had a digest."""
        return ()
