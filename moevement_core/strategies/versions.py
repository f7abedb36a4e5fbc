"""Common part of schedules that leave experts to older snapshots: those of MoC-System and MoEtion."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.policy.schedule import LAG_ALLOWANCE, Schedule
from moevement_core.snapshot.agreement import HORIZON

MOST_REACH = HORIZON // 2 - 2 * LAG_ALLOWANCE
"""Most iterations in which the full state of every operator must be saved once.

A run after a gap is up to twice as long, and ranks agree on runs that began at most :data:`HORIZON` iterations ago.
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
        """Iterations of snapshots that a job takes at its start: those of one run."""
        return self.snapshots * self.interval

    def next_boundary(self, iteration: int) -> int:
        """Return the first iteration, ``iteration`` or later, with a snapshot, whose experts can still be chosen."""
        return max(self.start, iteration + (self.start - iteration) % self.interval)

    def last_of_run(self, first: int) -> int:
        """Return the iteration of the last snapshot of the run that begins with ``SS_first``."""
        return first + (self.snapshots - 1) * self.interval

    def may_begin_at(self, iteration: int) -> bool:
        """Return True if ``SS_iteration`` is taken: any snapshot may begin a run."""
        return (iteration - self.start) % self.interval == 0

    def decided_at(self, iteration: int) -> int:
        """Return the iteration of the newest snapshot, up to which tokens were counted to choose experts."""
        return iteration - (iteration - self.start) % self.interval

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """Return the most snapshots that a rank keeps: one run more, because the next run begins anew after a gap."""
        return self.snapshots + self.slots_at_first(lag, to_disk=to_disk)

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Return how many snapshots a rank keeps while nothing fails.

        They are the persisted run, the snapshots taken before all ranks know of a newer one, and a run that is being
        written to disk.
        """
        return self.snapshots * (1 + to_disk) + -(-(2 + lag) // self.interval)

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """Return how many iterations logs reach back, from the iteration under way to the newest persisted snapshot."""
        return 2 * self.interval + lag + 1

    def replayed_after(self, run: tuple[int, int]) -> int:
        """Return the last snapshot of the run: iterations after it are executed again."""
        return run[1]

    def most_replayed(self, lag: int) -> int:
        """Return the most iterations that a recovery replays, from the newest snapshot that peers have."""
        return lag + self.interval

    def expected_rollback(self, lag: float) -> float:
        """Return the mean rollback, iterations: the lag, half the interval, and one in which the snapshot is copied."""
        return lag + self.interval / 2 + 1

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """Return no operators: after a recovery that lost updates, no state equals the one that was digested."""
        return ()
