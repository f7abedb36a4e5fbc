"""Simulated cost of the failures of a job whose windows changed while it ran.

A job on links or processors that it does not know yet changes the size and the period of its windows. So the iterations
that a failure repeats depend on the windows that the job had at that time. A :class:`WindowPhase` is a time
between two such changes. The functions here take phases and the iteration of each kill from the job, and the costs from
the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moevement_core.simulator.costs import LostState, StrategyCost

INTO = 0.5
"""Share of an iteration that is done when a rank fails, on average."""


@dataclass(frozen=True)
class WindowPhase:
    """Iterations of a job in which its windows stayed the same."""

    first: int
    """Iteration with which the first window of the phase began."""
    strategy: StrategyCost
    """Simulated strategy with the windows of the phase."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of one or several ranks of a job."""

    committed: int
    """Newest iteration that the job had committed."""
    at_s: float
    """Seconds since the first commit, on the time scale of the simulated job."""
    ranks: Sequence[int]


def lost_s(phases: Sequence[WindowPhase], kills: Sequence[Kill]) -> float:
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


def _recovery_s(phases: Sequence[WindowPhase], committed: int, ranks: set[int]) -> float:
    """Return the simulated seconds of a recovery from the newest restore point of any phase."""
    first = phases[0]
    # Before its first iteration, a job captures all snapshots of a window, so it can go back to its start.
    at_start = _RestorePoint(first.first, 0, INTO, first.strategy)
    point = max(_restore_points(phases, committed), default=at_start, key=lambda point: point.iteration)
    recovery = point.strategy.recover(LostState(point.trained, point.into, nodes=ranks, hosts=ranks))
    after_phase = committed - point.iteration - recovery.replayed
    return recovery.total_s + max(0, after_phase) * point.strategy.replay_iteration_s(ranks)


@dataclass(frozen=True)
class _RestorePoint:
    """Newest restore point of a phase."""

    iteration: int
    trained: int
    """Iterations of the phase up to the kill, or up to the end of the phase."""
    into: float
    """Iterations that passed after them until the kill, as far as they let more snapshots of the phase arrive."""
    strategy: StrategyCost


def _restore_points(phases: Sequence[WindowPhase], committed: int) -> Iterator[_RestorePoint]:
    """Yield the newest restore point of each phase that has one."""
    ends = [later.first for _, later in pairwise(phases)]
    for phase, end in zip(phases, [*ends, committed + 1], strict=True):
        newest = min(committed, end - 1)
        trained, strategy = newest - phase.first, phase.strategy
        if trained < 0:
            continue
        # Later iterations let snapshots arrive, but the phase has none after its last iteration.
        into = min(INTO + committed - newest, max(INTO, strategy.arrival))
        has_arrived = trained + into >= strategy.arrival or phase is phases[0]
        if has_arrived and (rollback := strategy.rollback(trained, into)) <= trained:
            yield _RestorePoint(phase.first + trained - rollback, trained, into, strategy)
