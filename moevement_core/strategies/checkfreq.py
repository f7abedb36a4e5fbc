"""CheckFreq (FAST '21): saves the whole state to disk in two phases, as often as a cap on the cost allows.

Each snapshot is copied to host memory beside the next iteration, and written from there to disk in the background. The
strategy profiles the first iterations. Then it chooses the shortest interval in which a checkpoint becomes durable
before the next one begins. It lengthens the interval while the measured cost is above the cap. After a failure all
ranks go back to the newest checkpoint that is durable on every rank, and re-execute the later iterations with the same
batches.
"""

from __future__ import annotations

from moevement_core.operators import OperatorTable
from moevement_core.policy.interval import hidden_interval, tuned_interval
from moevement_core.policy.schedule import Schedule
from moevement_core.strategies.dense import Dense
from moevement_core.strategies.strategy import Measured

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

    def __init__(self, table: OperatorTable, interval: int | None = None, cap: float = OVERHEAD_CAP) -> None:
        super().__init__(table, interval)
        self.cap = cap
        self._has_profiled = False

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return the interval: in the first call the shortest that hides a checkpoint, later one within the cap.

        An interval hides a checkpoint if the checkpoint is durable before the next one begins.
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
        """Take over another rank's profiling state."""
        self._has_profiled = learned
