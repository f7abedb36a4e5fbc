"""When replicas are allocated anew: by recent loads, and only where it is worth a migration (Lazarus, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moevement_core.elastic.allocation import Replicas, allocate, slowest_share
from moevement_core.errors import ConfigError

Loads = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """What keeps a job from migrating for every wave of its routing.

    Attributes:
        interval: iterations between two looks.
        gain: part of the slowest replica's tokens that a new allocation has to save.
        memory: how much of the loads known so far an iteration leaves of them.
    """

    interval: int = 200
    gain: float = 0.1
    memory: float = 0.9

    def __post_init__(self) -> None:
        if self.interval < 1 or not 0.0 <= self.gain < 1.0 or not 0.0 <= self.memory < 1.0:
            raise ConfigError(f"{self}; needs an interval of 1 or more, and gain and memory from 0 to below 1")


class LoadMonitor:
    """The loads of a layer's experts, smoothed, and whether they ask for another allocation.

    Args:
        experts: E.
        hysteresis: see there.
    """

    def __init__(self, experts: int, hysteresis: Hysteresis) -> None:
        self._hysteresis = hysteresis
        self._seen = 0
        self.loads: Loads = np.zeros(experts)
        """Tokens of each expert in an iteration, float64 ``[E]``, as of late."""

    def count(self, tokens: npt.NDArray[np.integer]) -> None:
        """Another iteration's ``[E]``, of all ranks together."""
        memory = self._hysteresis.memory if self._seen else 0.0
        self.loads = memory * self.loads + (1.0 - memory) * tokens
        self._seen += 1

    def proposed(self, replicas: Replicas, floor: int) -> Replicas | None:
        """Another allocation of as many replicas, where it is time to look and one is worth it."""
        if not self._seen or self._seen % self._hysteresis.interval:
            return None
        whole = np.round(self.loads * 1024).astype(np.int64)
        better = allocate(whole, int(replicas.sum()), floor)
        now, then = slowest_share(whole, replicas), slowest_share(whole, better)
        is_worth_it = then <= (1.0 - self._hysteresis.gain) * now and not np.array_equal(better, replicas)
        return better if is_worth_it else None
