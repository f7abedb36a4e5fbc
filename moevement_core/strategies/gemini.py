"""GEMINI (SOSP '23): everything to the memory of the peers of a placement group, rarely to disk.

The whole state is copied to host memory and sent to the m - 1 other nodes of the rank's group
(:mod:`moevement_core.replication.placement`, ``groups``); the interval is given, or the shortest in which a checkpoint
is copied and sent. After a failure all ranks go back to the newest checkpoint that is whole for all of them: survivors
to that in their own memory, replacements to a peer's copy, and to disk where a whole group was lost.
"""

from __future__ import annotations

from moevement_core.policy.interval import hidden_interval
from moevement_core.policy.schedule import Schedule
from moevement_core.strategies.dense import Dense
from moevement_core.strategies.strategy import Measured


class Gemini(Dense):
    """Dense snapshots in the memory of the rank itself and of its group; all ranks roll back."""

    name = "gemini"
    rolls_back_all = True

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """The shortest interval in which a checkpoint is copied, and sent to every peer."""
        full = self.heaviest_bytes
        checkpoint_s = full / measured.d2h_bytes_per_s
        if measured.replicas:
            checkpoint_s += full * measured.replicas / measured.replication_bytes_per_s
        return (hidden_interval(checkpoint_s, measured.delay_s, measured.iteration_s),)
