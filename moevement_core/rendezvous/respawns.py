"""Account of the processes that supervisors start in place of ended ones, and of how long such starts take."""

from __future__ import annotations

from collections.abc import Callable

WAIT_S = 20.0
"""Seconds for which the coordinator expects a starting process to join, as long as it has not measured any start."""
LONGEST_WAIT_S = 60.0
"""Longest time in seconds for which the coordinator expects a starting process to join."""


class Respawns:
    """Account of the processes that supervisors are starting in place of ended ones; the coordinator keeps it.

    Args:
        clock: returns monotonic seconds.
        wait_s: seconds for which the coordinator expects a starting process to join, as long as it has not measured any
            start; 0: supervisors start no processes in place of ended ones.
    """

    def __init__(self, clock: Callable[[], float], wait_s: float = WAIT_S) -> None:
        self._clock, self._wait_s, self._slowest_s = clock, wait_s, 0.0
        self._begun: dict[str, list[float]] = {}
        """Values of the clock in seconds when supervisors began to start processes that have not joined, by node.

        The oldest value of a node is first.
        """

    def begins(self, node: str) -> None:
        """Note that a process on ``node`` has ended, and that its supervisor lives and starts another process."""
        self._begun.setdefault(node, []).append(self._clock())

    def has_joined(self, node: str) -> None:
        """Note that a process on ``node`` has joined, and measure how long its start took.

        From now on, the coordinator expects a starting process for twice the duration of the slowest start, plus a
        second.
        """
        begun = [at for at in self._begun.pop(node, ()) if self._clock() - at < LONGEST_WAIT_S]
        if begun and self._wait_s:
            self._begun[node] = begun[1:]
            self._slowest_s = max(self._slowest_s, self._clock() - begun[0])
            self._wait_s = min(2.0 * self._slowest_s + 1.0, LONGEST_WAIT_S)

    def are_lost(self, node: str) -> None:
        """Note that no process will join from ``node``, because the node is lost or has no device left."""
        self._begun.pop(node, None)

    def starting(self) -> dict[str, int]:
        """Return the number of processes that are being started on each node."""
        recent = {node: sum(self._clock() - at < LONGEST_WAIT_S for at in begun) for node, begun in self._begun.items()}
        return {node: count for node, count in recent.items() if count and self._wait_s}

    def is_expected(self, node: str) -> bool:
        """Return True if a start on ``node`` has begun so recently that its process may still join."""
        return any(self._clock() - at < self._wait_s for at in self._begun.get(node, ()))
