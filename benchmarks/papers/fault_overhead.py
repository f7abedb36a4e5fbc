"""MoC-System's model of the overhead of fault tolerance (sections 2.3 and 6.2.5, equations 3, 4 and 10 to 16).

Seconds are those of one rank. A rate is the mean number of failures in an iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def saving_s(snapshot_s: float, hidden_s: float) -> float:
    """Return the seconds by which a snapshot delays training (equation 10).

    Args:
        snapshot_s: seconds of the copy from the GPU to the host.
        hidden_s: seconds of the forward and backward passes, which hide the copy.
    """
    return max(0.0, snapshot_s - hidden_s)


@dataclass(frozen=True)
class Faults:
    """Failures of a training, and what each costs beside the lost iterations."""

    rate: float
    """Mean number of failures in an iteration."""
    restart_s: float
    """Seconds of a restart."""
    iteration_s: float
    """Seconds of an iteration."""

    def expected(self, iterations: int) -> float:
        """Return the expected number of failures (equation 11)."""
        return self.rate * iterations

    def total_s(self, saving_s: float, interval: int, iterations: int) -> float:
        """Return the expected overhead of a training in seconds (equations 4, 12 and 13).

        A failure loses half of an interval on average.

        Args:
            saving_s: seconds by which a checkpoint delays training.
            interval: iterations from one checkpoint to the next.
            iterations: iterations of the training.
        """
        lost_s = interval / 2 * self.iteration_s
        return iterations / interval * saving_s + self.expected(iterations) * (self.restart_s + lost_s)

    def best_interval(self, saving_s: float) -> int:
        """Return the interval with the least :meth:`total_s`: the whole number beside the minimum of equation 4."""
        least = max(1, math.floor(math.sqrt(2 * saving_s / (self.rate * self.iteration_s))))
        return min((least, least + 1), key=lambda interval: self.total_s(saving_s, interval, iterations=1))

    def is_cheaper(self, saving_s: float, interval: int, full_saving_s: float, full_interval: int) -> bool:
        """Return True if checkpoints that leave experts out cost less than full ones (equations 14 to 16).

        Restarts cost the same and cancel out, as does the length of the training.
        """
        partial = saving_s / interval + self.rate * interval / 2 * self.iteration_s
        return partial < full_saving_s / full_interval + self.rate * full_interval / 2 * self.iteration_s
