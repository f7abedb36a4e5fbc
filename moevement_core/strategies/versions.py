"""Common part of the schedules of MoC-System and MoEtion, whose snapshots may leave out experts.

If a snapshot leaves out an expert, a recovery takes this expert from an older snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.policy.schedule import LAG_ALLOWANCE, Schedule
from moevement_core.snapshot.agreement import HORIZON

MOST_REACH = HORIZON // 2 - 2 * LAG_ALLOWANCE
"""Most iterations that a job may take to save the full state of every operator once.

Ranks can agree only on runs that began at most :data:`HORIZON` iterations ago. If a snapshot is missing, a run may be
twice as long as usual.
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
        """Number of iterations that the first snapshots of a job take to save every operator once."""
        return self.snapshots * self.interval

    def next_boundary(self, iteration: int) -> int:
        """Return the first iteration from ``iteration`` on that has a snapshot.

        A new schedule with other experts may begin there, because every snapshot has its own choice of experts.
        """
        return max(self.start, iteration + (self.start - iteration) % self.interval)

    def last_of_run(self, first: int) -> int:
        """Return the iteration of the last snapshot of the run that begins with ``SS_first``."""
        return first + (self.snapshots - 1) * self.interval

    def may_begin_at(self, iteration: int) -> bool:
        """Return True if ``SS_iteration`` is captured; any captured snapshot may begin a recoverable run."""
        return (iteration - self.start) % self.interval == 0

    def decided_at(self, iteration: int) -> int:
        """Return the iteration of the newest snapshot up to ``iteration``.

        Tokens counted until that snapshot decide which experts the next snapshot holds.
        """
        return iteration - (iteration - self.start) % self.interval

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """Return the largest number of its own snapshots that a rank keeps.

        If a snapshot is missing, a rank keeps a new run of snapshots in addition to those of :meth:`slots_at_first`.
        """
        return self.snapshots + self.slots_at_first(lag, to_disk=to_disk)

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Return the number of snapshots that a rank keeps while nothing fails.

        These are the persisted run, the snapshots captured until all ranks know that a newer run is persisted, and with
        ``to_disk`` one more run that is being written to disk.
        """
        return self.snapshots * (1 + to_disk) + -(-(2 + lag) // self.interval)

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """Return the most iterations that boundary logs hold; they reach back to the newest persisted snapshot."""
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
        """Return no operators, because digests of whole operators would check nothing.

        A recovery that loses updates does not restore the state from which these digests would be computed.
        """
        return ()
