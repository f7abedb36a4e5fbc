"""Dense strategies, which save the whole state every k iterations. CheckFreq and GEMINI subclass :class:`Dense`.

Dense strategies are the simplest ones. The engine uses them through the same interface as all other strategies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.policy.schedule import Cadence, Contents, Retention, Rollback, Saved, Schedule, schedule_id
from moevement_core.policy.window import shortest_period
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.strategy import Measured, Proposal, StageOperators, Strategy

FIRST_INTERVAL = 10
"""Iterations between snapshots before anything is measured."""


@dataclass(frozen=True, eq=False)
class DenseSchedule(Schedule):
    """Schedule that saves full state of every operator at ``start`` and every ``interval`` iterations after it."""

    interval: int

    @property
    def size(self) -> int:
        """Number of iterations between snapshots."""
        return self.interval

    @property
    def snapshots(self) -> int:
        """Number of snapshots of a window, always 1."""
        return 1

    @property
    def is_dense(self) -> bool:
        """True, because every snapshot is dense."""
        return True

    @cached_property
    def id(self) -> str:
        """Digest of start, interval and operator names, hexadecimal."""
        return schedule_id(self.table.names, self.start, "dense", self.interval)

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return full state of all operators for slot 0, the first iteration of an interval; None for later slots."""
        return np.full(len(self.table), Saved.FULL, dtype=np.int8) if slot == 0 else None

    @property
    def cadence(self) -> Cadence:
        """Runs of one snapshot, one in every interval."""
        return Cadence(run=1, run_start=self.interval, decision=self.interval, reach=self.interval)

    def retention(self, lag: int, *, to_disk: bool = False) -> Retention:
        """Return for how many iterations a rank keeps snapshots and logs.

        A rank keeps the newest snapshot that it knows as persisted, all later ones, and with ``to_disk`` one more that
        is being written to disk. Without lag, all ranks know a snapshot as persisted two iterations after its capture:
        it is reported in the first of these iterations, and known to all ranks in the second.

        Logs hold the current iteration, all iterations since the oldest kept snapshot, and one interval more, because
        a rank may have left out a snapshot.
        """
        slots = 1 + -(-(2 + lag) // self.interval) + to_disk
        logged = (slots + 1) * self.interval + lag + 1
        return Retention(slots, slots, logged, logged)

    def rollback(self, lag: float) -> Rollback:
        """Return how many iterations a failure costs: the lag, half an interval, and one iteration for the copy.

        At most, a recovery replays all iterations after the newest snapshot that peers have.
        """
        return Rollback(lag + self.interval / 2 + 1, math.ceil(lag) + self.interval)


class Dense(Strategy):
    """Base of strategies that save dense snapshots at an interval.

    Args:
        table: the operators of the stage.
        interval: k, iterations between snapshots; None to choose it from measurements.
        cap: share of training time that saving may cost if ``interval`` is None.
    """

    def __init__(self, table: OperatorTable, interval: int | None, cap: float = OVERHEAD_CAP) -> None:
        super().__init__(table)
        self.interval, self.cap = interval, cap
        self.settled = interval is not None

    def first(self, start: int, most: int) -> DenseSchedule:
        """Return the schedule that begins with a snapshot of the job's first state."""
        return DenseSchedule(self.table, self.interval or FIRST_INTERVAL, start=start)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Propose the interval in ``sizes``, with the current schedule as the alternative."""
        if sizes is None:
            return Proposal([now], is_change=False)
        return Proposal([DenseSchedule(self.table, sizes[0]), now], is_change=sizes[0] != now.size)

    def affordable_interval(self, now: Schedule, measured: Measured) -> int:
        """Return the shortest interval, in iterations, that links and the cap on overhead allow."""
        to_save = measured.bytes_to_save(self.heaviest_bytes / now.size, self.cap)
        return shortest_period(self.heaviest_bytes, 1, to_save, MOST_PERIOD)

    @property
    def heaviest_bytes(self) -> int:
        """Bytes of the full state of all operators, on the rank of the stage that has the most."""
        return int(self.table.full.sum(axis=1).max())


class DenseToPeers(Dense):
    """Strategy with dense snapshots in peers' memory, and on disk with ``--moevement-persist-dir``.

    After a failure only the stages that lost state roll back.
    """

    name = "dense"
    is_tuned = True
    flags = frozenset({"dense_interval", "overhead_cap"})
    cap_by_default = OVERHEAD_CAP
    exceeds_cap = True
    interval_by_default = FIRST_INTERVAL

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> DenseToPeers:
        """Return the strategy of a stage; see :meth:`Strategy.of`."""
        return cls(stage.table, config.dense_interval, config.cap)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return :data:`FIRST_INTERVAL`, or a longer interval if links or the cap on overhead need one."""
        return (max(FIRST_INTERVAL, self.affordable_interval(now, measured)),)
