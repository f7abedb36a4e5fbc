"""Simulated cost of the failures of a job whose windows changed while it ran.

A job on links or processors that it does not know yet changes the size and the period of its windows. So the iterations
that a failure repeats depend on the windows that the job had at that time. A :class:`Phase` is a time between two such
changes. The functions here take phases and the iteration of each kill from the job, and the costs from the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moevement_core.simulator.strategies import Strategy

INTO = 0.5
"""Share of an iteration that is done when a rank fails, on average."""


@dataclass(frozen=True)
class Phase:
    """Iterations of a job in which its windows stayed the same."""

    first: int
    """Iteration with which the first window of the phase began."""
    strategy: Strategy
    """Simulated strategy with the windows of the phase."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of one or several ranks of a job."""

    committed: int
    """Newest iteration that the job had committed."""
    at_s: float
    """Seconds since the first commit, on the time scale of the simulated job."""
    ranks: Sequence[int]


def lost_s(phases: Sequence[Phase], kills: Sequence[Kill]) -> float:
    """Return the simulated seconds that failures take from a job: recoveries, and the iterations that were interrupted.

    A kill during a recovery begins the recovery anew, for the ranks of both kills.

    Args:
        phases: phases of the job in order; at least one.
        kills: kills in order of time.
    """
    total_s, killed = 0.0, set[int]()
    for kill, later in pairwise([*kills, Kill(0, math.inf, ())]):
        killed |= set(kill.ranks)
        recovery_s = _recovery_s(phases, kill.committed, killed)
        if kill.at_s + recovery_s > later.at_s:
            total_s += later.at_s - kill.at_s
            continue
        total_s += recovery_s + INTO * phases[-1].strategy.costs.iteration_s
        killed.clear()
    return total_s


def _recovery_s(phases: Sequence[Phase], committed: int, ranks: set[int]) -> float:
    """Return the simulated seconds of a recovery from the newest restore point of any phase."""
    first = phases[0]
    # Before its first iteration, a job captures all snapshots of a window, so it can go back to its start.
    best = max(_restore_points(phases, committed), default=(first.first, 0, first.strategy), key=lambda point: point[0])
    restored, trained, strategy = best
    recovery = strategy.recover(trained, ranks, INTO)
    after_phase = committed - restored - recovery.replayed
    return recovery.total_s + max(0, after_phase) * strategy.replay_iteration_s(ranks)


def _restore_points(phases: Sequence[Phase], committed: int) -> Iterator[tuple[int, int, Strategy]]:
    """Yield the newest restore point of each phase that has one.

    A restore point is an iteration, the number of iterations of its phase up to ``committed``, and the strategy.
    """
    ends = [later.first for _, later in pairwise(phases)]
    for phase, end in zip(phases, [*ends, committed + 1], strict=True):
        trained = min(committed, end - 1) - phase.first
        if trained < 0:
            continue
        rollback = phase.strategy.rollback(trained, INTO)
        if rollback <= trained:
            yield phase.first + trained - rollback, trained, phase.strategy
