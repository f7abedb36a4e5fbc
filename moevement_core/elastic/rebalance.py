"""Decision whether a new allocation of replicas, from recent loads, is worth a migration (Lazarus, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moevement_core.elastic.allocation import Replicas, allocate, slowest_share
from moevement_core.errors import ConfigError

Loads = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Thresholds that keep a job from migrating at every fluctuation of its routing.

    Attributes:
        interval: iterations between two decisions.
        gain: share of the slowest replica's tokens that a new allocation must save, from 0 to below 1.
        memory: weight of earlier iterations in the moving average of the loads, from 0 to below 1.
    """

    interval: int = 200
    gain: float = 0.1
    memory: float = 0.9

    def __post_init__(self) -> None:
        if self.interval < 1 or not 0.0 <= self.gain < 1.0 or not 0.0 <= self.memory < 1.0:
            raise ConfigError(f"{self}; needs an interval of 1 or more, and gain and memory from 0 to below 1")


class LoadMonitor:
    """Monitor of the loads of a layer's experts. It averages the loads and proposes new allocations.

    Args:
        experts: number of experts, E.
        hysteresis: thresholds of a new allocation.
    """

    def __init__(self, experts: int, hysteresis: Hysteresis) -> None:
        self._hysteresis = hysteresis
        self._seen = 0
        self.loads: Loads = np.zeros(experts)
        """Moving average of the tokens of each expert in an iteration, float64 ``[E]``."""

    def count(self, tokens: npt.NDArray[np.integer]) -> None:
        """Add the loads of one more iteration: tokens of each expert, summed over all ranks, ``[E]``."""
        memory = self._hysteresis.memory if self._seen else 0.0
        self.loads = memory * self.loads + (1.0 - memory) * tokens
        self._seen += 1

    def proposed(self, replicas: Replicas, floor: int) -> Replicas | None:
        """Return a better allocation with the same total number of replicas, int64 ``[E]``, or None.

        None means that the interval has not elapsed, or that the gain is too small.

        Args:
            replicas: present number of replicas of each expert, int64 ``[E]``.
            floor: least number of replicas of each expert.
        """
        if not self._seen or self._seen % self._hysteresis.interval:
            return None
        whole = np.round(self.loads * 1024).astype(np.int64)
        better = allocate(whole, int(replicas.sum()), floor)
        now, then = slowest_share(whole, replicas), slowest_share(whole, better)
        is_worth_it = then <= (1.0 - self._hysteresis.gain) * now and not np.array_equal(better, replicas)
        return better if is_worth_it else None
