"""Everything at once, every k iterations: what other systems' checkpoints in the memory of peers are (Gemini's).

The smallest strategy there is, and the measure of the seam: the engine knows schedules, and not this one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.strategies.strategy import Strategy


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


class DenseToPeers(Strategy):
    """Dense snapshots in the memory of peers, and on disk where that is wanted.

    Args:
        table: the operators of the stage.
        interval: k, iterations.
    """

    name = "dense"

    def __init__(self, table: OperatorTable, interval: int) -> None:
        super().__init__(table)
        self.interval = interval

    def first(self, start: int, most: int) -> DenseSchedule:
        """The state that the run begins from is saved at once."""
        return DenseSchedule(self.table, self.interval, start=start)
