"""Failures of nodes, which are random or read from a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moevement_core.errors import ConfigError
from moevement_core.restart.faults import removals
from moevement_core.util.numbers import AT_LEAST_ONE, POSITIVE, SHARE, Range

MOST_FAILURES = 1_000_000
"""Largest total number of failures in all trainings at one failure rate. To simulate so many takes minutes."""
SHAPES = Range(0.1, 100.0)
"""Allowed Weibull shapes. With shapes below 0.1, nearly all failures of a training would come at one moment."""


@dataclass(frozen=True, order=True)
class Failure:
    """Failure of one or more nodes at one moment."""

    at_s: float
    nodes: tuple[int, ...]
    keeps_memory: bool = False
    """True if only processes failed: the nodes keep their host memory, and no spare replaces them."""


@dataclass(frozen=True)
class FailureModel:
    """Random failures of a job; equal seeds give equal failures.

    Raises:
        ConfigError: a value is out of its range.
    """

    mtbf_s: float
    """Mean seconds between failures of the job, not of a node."""
    nodes: int
    shape: float = 1.0
    """Shape of the Weibull distribution of times between failures. 1: Poisson process; less than 1: bursts."""
    together: float = 0.0
    """Probability that a failure of a node also takes the node with the next number, and so on from node to node."""

    processes: float = 0.0
    """Probability that a failure ends processes only, so that host memory of its nodes survives."""

    def __post_init__(self) -> None:
        POSITIVE.check("mtbf", self.mtbf_s)
        SHARE.check("processes", self.processes)
        AT_LEAST_ONE.check("nodes", self.nodes)
        SHAPES.check("Weibull shape", self.shape)
        if not 0 <= self.together < 1:
            raise ConfigError(
                f"probability {self.together} of nodes failing together; needs at least 0 and less than 1"
            )

    def draw(self, until_s: float, seed: int) -> list[Failure]:
        """Return the failures of the first ``until_s`` seconds, in order of time.

        Raises:
            ConfigError: more than :data:`MOST_FAILURES` failures are expected.
        """
        check_count(self.mtbf_s, until_s)
        generator = np.random.default_rng(seed)
        scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
        failures: list[Failure] = []
        at = 0.0
        while True:
            at += scale * float(generator.weibull(self.shape))
            if at >= until_s:
                return failures
            first = int(generator.integers(self.nodes))
            count = min(int(generator.geometric(1 - self.together)), self.nodes)
            # If processes never fail alone, no number is drawn, so that simulations from before this option keep their
            # results.
            keeps_memory = bool(self.processes) and bool(generator.random() < self.processes)
            failures.append(Failure(at, tuple((first + number) % self.nodes for number in range(count)), keeps_memory))


def check_count(mtbf_s: float, until_s: float, trainings: int = 1) -> None:
    """Raise an error if ``trainings`` trainings of ``until_s`` seconds have too many failures to simulate them.

    Raises:
        ConfigError: more than :data:`MOST_FAILURES` failures are expected in all trainings together.
    """
    if trainings * (1 + until_s / mtbf_s) > MOST_FAILURES:
        raise ConfigError(
            f"mtbf {mtbf_s:g}: {3600 / mtbf_s:.3g} failures an hour, in {trainings} trainings of {until_s / 3600:g} "
            f"hours; at most {MOST_FAILURES:,} failures can be simulated: give a longer mtbf, fewer hours or fewer "
            "trainings"
        )


def recorded(trace: Path, nodes: int, speedup: float = 1.0) -> list[Failure]:
    """Return the failures of a trace. All nodes that fail at the same moment are in one failure.

    Args:
        trace: path of the trace.
        nodes: number of nodes of the simulated job.
        speedup: factor by which failures come faster than in the trace.

    Raises:
        ConfigError: the file is not a trace.
    """
    together: dict[float, set[int]] = {}
    for at_s, node in removals(trace, nodes, speedup):
        together.setdefault(at_s, set()).add(node)
    return [Failure(at_s, tuple(sorted(lost))) for at_s, lost in sorted(together.items())]


def mean_time_between(failures: Sequence[Failure], until_s: float) -> float:
    """Return the mean seconds between recorded failures; infinite if there are none."""
    return until_s / len(failures) if failures else math.inf
