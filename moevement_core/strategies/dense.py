"""Everything at once, every k iterations: what CheckFreq and Gemini save, and the smallest strategy there is.

The measure of the seam: the engine knows schedules, and not this one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.policy.window import shortest_period
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.strategies.strategy import Measured, Proposal, Strategy

FIRST_INTERVAL = 10
"""Iterations, before anything is measured."""


@dataclass(frozen=True, eq=False)
class DenseSchedule(Schedule):
    """Full state of every operator with ``state@start``, and again every ``interval`` iterations."""

    interval: int

    @property
    def size(self) -> int:
        """The interval."""
        return self.interval

    @property
    def snapshots(self) -> int:
        """One."""
        return 1

    @property
    def is_dense(self) -> bool:
        """Always."""
        return True

    @cached_property
    def id(self) -> str:
        """Of start, interval and operators."""
        digest = hashlib.sha256(repr((self.start, "dense", self.interval)).encode())
        digest.update("\n".join(self.table.names).encode())
        return digest.hexdigest()[:16]

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Everything in the first slot, nothing in the others."""
        return np.full(len(self.table), Saved.FULL, dtype=np.int8) if slot == 0 else None

    def last_of_run(self, first: int) -> int:
        """A snapshot is enough by itself."""
        return first

    def may_begin_at(self, iteration: int) -> bool:
        """With every snapshot."""
        return self.slot(iteration) == 0

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """The persisted one, those that are taken before all ranks know of a newer one, and one that is written.

        One is taken in an iteration, reported in the next, and known to all in the one after.
        """
        return 1 + -(-(2 + lag) // self.interval) + to_disk

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """Back to the oldest that is kept, one more that may have been left out, and the iteration under way."""
        return (self.slots_kept(lag, to_disk=to_disk) + 1) * self.interval + lag + 1

    def most_replayed(self, lag: int) -> int:
        """Back to the newest snapshot that peers have."""
        return lag + self.interval

    def expected_rollback(self, lag: float) -> float:
        """Half the interval, and the iteration in which a snapshot is copied."""
        return lag + self.interval / 2 + 1

    def with_windows_of(self, other: Schedule) -> DenseSchedule:
        """The same iterations."""
        return replace(self, start=other.start, interval=other.size)

    def starting_at(self, start: int) -> DenseSchedule:
        """The same interval."""
        return replace(self, start=start)


class Dense(Strategy):
    """Dense snapshots every so many iterations.

    Args:
        table: the operators of the stage.
        interval: k, iterations; None: as measured, where the strategy measures it.
        cap: share of training time that saving may cost, where the interval is measured.
    """

    def __init__(self, table: OperatorTable, interval: int | None, cap: float = OVERHEAD_CAP) -> None:
        super().__init__(table)
        self.interval, self.cap = interval, cap
        self.settled = interval is not None

    def first(self, start: int, most: int) -> DenseSchedule:
        """The state that the run begins from is saved at once."""
        return DenseSchedule(self.table, self.interval or FIRST_INTERVAL, start=start)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """The interval that was measured, if it is another one."""
        if sizes is None:
            return Proposal([now], is_change=False)
        return Proposal([DenseSchedule(self.table, sizes[0]), now], is_change=sizes[0] != now.size)

    def affordable_interval(self, now: Schedule, measured: Measured) -> int:
        """Return the fewest iterations from one snapshot to the next that links and the cap on overhead allow."""
        to_save = measured.bytes_to_save(self.heaviest_bytes / now.size, self.cap)
        return shortest_period(self.heaviest_bytes, 1, to_save, MOST_PERIOD)

    @property
    def heaviest_bytes(self) -> int:
        """Full state of the rank of the stage that has the most."""
        return int(self.table.full.sum(axis=1).max())


class DenseToPeers(Dense):
    """Dense snapshots in the memory of peers, and on disk where that is wanted; lost stages alone roll back."""

    name = "dense"
    is_tuned = True

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return :data:`FIRST_INTERVAL`, or a longer interval where links or the cap ask for one."""
        return (max(FIRST_INTERVAL, self.affordable_interval(now, measured)),)
