"""Common part of the schedules of MoC-System and MoEtion, whose snapshots may leave out experts.

If a snapshot leaves out an expert, a recovery takes this expert from an older snapshot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.policy.schedule import LAG_ALLOWANCE, Cadence, Retention, Rollback, Schedule
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

    restores_last = True

    @property
    def cadence(self) -> Cadence:
        """Runs that any snapshot may begin, and a decision before each snapshot, which has its own choice of experts.

        The first snapshots of a job together save every operator once.
        """
        return Cadence(
            run=(self.snapshots - 1) * self.interval + 1, run_start=self.interval, decision=self.interval,
            reach=self.snapshots * self.interval,
        )  # fmt: skip

    def retention(self, lag: int, *, to_disk: bool = False) -> Retention:
        """Return for how many iterations a rank keeps snapshots and logs.

        While nothing fails, a rank keeps the persisted run, the snapshots captured until all ranks know that a newer
        run is persisted, and with ``to_disk`` one more run that is being written to disk. If a snapshot is missing, a
        rank keeps a new run of snapshots in addition. Logs reach back to the newest persisted snapshot.
        """
        at_first = self.snapshots * (1 + to_disk) + -(-(2 + lag) // self.interval)
        logged = 2 * self.interval + lag + 1
        return Retention(self.snapshots + at_first, at_first, logged, logged)

    def rollback(self, lag: float) -> Rollback:
        """Return how many iterations a failure costs: the lag, half an interval, and one iteration for the copy.

        At most, a recovery replays all iterations after the newest snapshot that peers have.
        """
        return Rollback(lag + self.interval / 2 + 1, math.ceil(lag) + self.interval)

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """Return no operators, because digests of whole operators would check nothing.

        A recovery that loses updates does not restore the state from which these digests would be computed.
        """
        return ()
