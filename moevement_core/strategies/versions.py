"""What schedules have in common that leave experts to older snapshots: MoC-System's and MoEtion's."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.policy.schedule import LAG_ALLOWANCE, Schedule
from moevement_core.snapshot.agreement import HORIZON

MOST_REACH = HORIZON // 2 - 2 * LAG_ALLOWANCE
"""Iterations in which every operator's full state has to be saved once: after a gap a run is up to twice as long, and
ranks agree on runs that began at most :data:`HORIZON` iterations ago."""


@dataclass(frozen=True, eq=False)
class VersionSchedule(Schedule):
    """A snapshot every ``interval`` iterations; :attr:`snapshots` of them in a row hold every operator's full state."""

    interval: int
    """Iterations from one snapshot to the next."""

    @property
    def reach(self) -> int:
        """All that a run has, and none beyond."""
        return self.snapshots * self.interval

    def next_boundary(self, iteration: int) -> int:
        """Every snapshot may be of other experts."""
        return max(self.start, iteration + (self.start - iteration) % self.interval)

    def last_of_run(self, first: int) -> int:
        """When every operator's full state is in one."""
        return first + (self.snapshots - 1) * self.interval

    def may_begin_at(self, iteration: int) -> bool:
        """With every snapshot."""
        return (iteration - self.start) % self.interval == 0

    def decided_at(self, iteration: int) -> int:
        """At every snapshot: tokens are counted up to there."""
        return iteration - (iteration - self.start) % self.interval

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """A run more than at first: after a gap the next one is new as a whole."""
        return self.snapshots + self.slots_at_first(lag, to_disk=to_disk)

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """The persisted run, those that are taken before all ranks know of a newer one, and a run that is written."""
        return self.snapshots * (1 + to_disk) + -(-(2 + lag) // self.interval)

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """Back to the newest snapshot that may be persisted, and the iteration under way."""
        return 2 * self.interval + lag + 1

    def replayed_after(self, run: tuple[int, int]) -> int:
        """From the last snapshot of the run on."""
        return run[1]

    def most_replayed(self, lag: int) -> int:
        """Back to the newest snapshot that peers have."""
        return lag + self.interval

    def expected_rollback(self, lag: float) -> float:
        """Half the interval, and the iteration in which a snapshot is copied."""
        return lag + self.interval / 2 + 1

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """None: after a recovery no state is what it was."""
        return ()
