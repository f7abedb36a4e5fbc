"""GEMINI (SOSP '23): everything to the memory of the peers of a placement group, rarely to disk.

The whole state is copied to host memory and sent to the m - 1 other nodes of the rank's group
(:mod:`moevement_core.replication.placement`, ``groups``), in chunks while training leaves the network alone
(:mod:`moevement_core.replication.pace`); the interval is given, or the shortest in which a checkpoint is copied and
sent. After a failure all ranks go back to the newest checkpoint that is whole for all of them: survivors to that in
their own memory, replacements to a peer's copy, and to disk where a whole group was lost.
"""

from __future__ import annotations

from typing import Any

from moevement_core.operators import OperatorTable
from moevement_core.overhead.cap import OVERHEAD_CAP
from moevement_core.policy.interval import hidden_interval
from moevement_core.policy.schedule import Schedule
from moevement_core.strategies.dense import Dense
from moevement_core.strategies.strategy import Measured, Proposal

PROFILED_WINDOWS = 3
"""After which the interval is chosen: in the first, it is found out when training communicates; in the second, how long
sending takes where it has to wait for that."""


class Gemini(Dense):
    """Dense snapshots in the memory of the rank itself and of its group; all ranks roll back.

    Args:
        table: the operators of the stage.
        interval: iterations; None: as measured.
        cap: share of training time that saving may cost, where the interval is measured; None: the paper has none.
    """

    name = "gemini"
    rolls_back_all = True
    paces_copies = True
    is_tuned = True

    def __init__(self, table: OperatorTable, interval: int | None, cap: float | None = None) -> None:
        super().__init__(table, interval, OVERHEAD_CAP if cap is None else cap)
        self._is_capped = cap is not None
        self._profiled = 0
        """Windows that were measured."""

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return the shortest interval in which a checkpoint is copied and sent to every peer, and that a cap on
        overhead allows, if one is given; and the window it is.

        Which window: ranks that are new, and stages of which nobody is left, learn it from the others.
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
        """The interval, once all is measured that it depends on."""
        if sizes is not None:
            self._profiled = sizes[1]
        is_known = self._profiled >= PROFILED_WINDOWS
        self.settled = self.settled or (is_known and not self._is_capped)
        return super().propose(now, sizes if is_known else None)

    def learned(self) -> Any:
        """Plain data."""
        return {"profiled": self._profiled}

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        self._profiled = learned["profiled"]
