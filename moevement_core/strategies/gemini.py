"""GEMINI (SOSP '23): saves the whole state in the memory of several nodes, and rarely on disk.

The job divides its nodes into groups whose nodes keep each other's copies (:mod:`moevement_core.replication.placement`,
``groups``). The engine copies a rank's whole state to host memory. Sender threads send this copy to the other nodes of
the group, in chunks, while training leaves the network idle (:mod:`moevement_core.replication.pace`). The user gives
the interval; otherwise it is the shortest one in which a rank can copy and send a checkpoint. After a failure all ranks
go back to the newest checkpoint of which every rank's state still exists. Survivors load this checkpoint from their own
memory, and replacements load it from a peer. If all nodes of a group fail, all ranks load from disk.
"""

from __future__ import annotations

from typing import Any

from moevement_core.operators import OperatorTable
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.policy.interval import hidden_interval
from moevement_core.policy.schedule import Schedule
from moevement_core.replication.placement import PlacementKind
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.dense import Dense
from moevement_core.strategies.strategy import Measured, Proposal, StageOperators

PROFILED_WINDOWS = 3
"""Number of windows that the job measures before it chooses the interval.

The first window shows when training communicates. In later windows sends wait until training leaves the network idle,
so the measured duration of sends includes these waits.
"""


class Gemini(Dense):
    """Strategy of GEMINI: dense snapshots in the memory of the rank and its group; all ranks roll back.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots; None to choose it from measurements.
        cap: share of training time that saving may cost if ``interval`` is None; None for no cap, as in GEMINI.
    """

    name = "gemini"
    rolls_back_all = True
    paces_copies = True
    is_tuned = True
    flags = frozenset({"dense_interval", "overhead_cap"})
    placement = PlacementKind.GROUPS

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> Gemini:
        """Return the strategy of a stage; see :meth:`Strategy.of`."""
        return cls(stage.table, config.interval, config.overhead_cap)

    def __init__(self, table: OperatorTable, interval: int | None, cap: float | None = None) -> None:
        super().__init__(table, interval, OVERHEAD_CAP if cap is None else cap)
        self._is_capped = cap is not None
        self._profiled = 0
        """Number of windows measured so far."""

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return the shortest possible interval, and the number of windows measured so far, including this one.

        The interval is long enough to copy a checkpoint and to send it to every peer. If the user gave a cap on
        overhead, the interval also keeps to that cap. The number of windows is one of the sizes because ranks share
        sizes. So a replacement gets the right number, even if it has no survivor in its stage.
        """
        full = self.heaviest_bytes
        checkpoint_s = full / measured.d2h_bytes_per_s
        if measured.replicas:
            checkpoint_s += full * measured.replicas / measured.replication_bytes_per_s
        hidden = hidden_interval(checkpoint_s, measured.delay_s, measured.iteration_s)
        if self._is_capped:
            hidden = max(hidden, self.affordable_interval(now, measured))
        return hidden, self._profiled + 1

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Propose ``now`` until :data:`PROFILED_WINDOWS` windows are measured, and then the interval in ``sizes``."""
        if sizes is not None:
            self._profiled = sizes[1]
        is_known = self._profiled >= PROFILED_WINDOWS
        self.settled = self.settled or (is_known and not self._is_capped)
        return super().propose(now, sizes if is_known else None)

    def learned(self) -> Any:
        """Return the number of measured windows as plain data."""
        return {"profiled": self._profiled}

    def adopt(self, learned: Any) -> None:
        """Take over another rank's number of measured windows."""
        self._profiled = learned["profiled"]
