"""CheckFreq (FAST '21): saves the whole state to disk in two phases, as often as a cap on the cost allows.

A rank copies each snapshot to host memory during the next iteration. Then a background thread writes it to disk. The
strategy measures the first iterations. From them it chooses the shortest interval in which a checkpoint is complete on
disk before the next one begins. It lengthens the interval while the measured cost is above the cap. After a failure all
ranks go back to the newest checkpoint that is complete on every rank's disk, and execute the later iterations again
with the same batches.
"""

from __future__ import annotations

from moevement_core.operators import OperatorTable
from moevement_core.policy.interval import hidden_interval, tuned_interval
from moevement_core.policy.schedule import Schedule
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.dense import Dense
from moevement_core.strategies.strategy import Measured, StageOperators

OVERHEAD_CAP = 0.035
"""Default share of training time that checkpoints of CheckFreq may cost."""


class CheckFreq(Dense):
    """Strategy of CheckFreq: dense snapshots on disk only.

    Args:
        table: the operators of the stage.
        interval: k, iterations between checkpoints; None to tune it.
        cap: share of training time that checkpoints may cost.
    """

    name = "checkfreq"
    rolls_back_all = True
    only_to_disk = True
    is_tuned = True
    flags = frozenset({"dense_interval", "overhead_cap"})
    cap_by_default = OVERHEAD_CAP

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> CheckFreq:
        """Return the strategy of a stage; see :meth:`Strategy.of`."""
        return cls(stage.table, config.interval, config.cap)

    def __init__(self, table: OperatorTable, interval: int | None = None, cap: float = OVERHEAD_CAP) -> None:
        super().__init__(table, interval)
        self.cap = cap
        self._has_profiled = False

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return the next interval.

        The first call returns the shortest interval in which a checkpoint is complete on disk before the next
        checkpoint begins. Later calls make the interval longer or shorter, so that the measured cost of checkpoints
        stays below the cap.
        """
        full = self.heaviest_bytes
        checkpoint_s = full / measured.d2h_bytes_per_s + full / measured.disk_bytes_per_s
        hidden = hidden_interval(checkpoint_s, measured.delay_s, measured.iteration_s)
        if not self._has_profiled:
            self._has_profiled = True
            return (hidden,)
        return (
            tuned_interval(
                now=now.size, hidden=hidden, overhead_s=measured.delay_s, iteration_s=measured.iteration_s, cap=self.cap
            ),
        )

    def learned(self) -> bool:
        """Return True if the first iterations have been profiled."""
        return self._has_profiled

    def adopt(self, learned: bool) -> None:
        """Take over the result of :meth:`learned` from another rank."""
        self._has_profiled = learned
