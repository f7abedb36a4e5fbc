"""Nodes on which a process is being started in the place of one that ended, and how long that takes there."""

from __future__ import annotations

from collections.abc import Callable

WAIT_S = 20.0
"""Seconds for which a process is expected before any start of the job was measured."""
LONGEST_WAIT_S = 60.0


class Respawns:
    """Processes that supervisors start in the place of those that ended, as the coordinator may expect them.

    Args:
        clock: seconds, monotonic.
        wait_s: how long to expect one before any start was measured; 0: none ever comes.
    """

    def __init__(self, clock: Callable[[], float], wait_s: float = WAIT_S) -> None:
        self._clock, self._wait_s, self._slowest_s = clock, wait_s, 0.0
        self._begun: dict[str, list[float]] = {}
        """Beginnings of the starts whose process has not come yet, by node."""

    def begins(self, node: str) -> None:
        """A process of this node has ended, and its supervisor lives."""
        self._begun.setdefault(node, []).append(self._clock())

    def has_joined(self, node: str) -> None:
        """A process of this node has joined; others may take twice as long as the slowest one so far."""
        begun = [at for at in self._begun.pop(node, ()) if self._clock() - at < LONGEST_WAIT_S]
        if begun and self._wait_s:
            self._begun[node] = begun[1:]
            self._slowest_s = max(self._slowest_s, self._clock() - begun[0])
            self._wait_s = min(2.0 * self._slowest_s + 1.0, LONGEST_WAIT_S)

    def are_lost(self, node: str) -> None:
        """The node has gone, or has no device for them: nobody comes."""
        self._begun.pop(node, None)

    def starting(self) -> dict[str, int]:
        """Return how many processes are being started on each node."""
        recent = {node: sum(self._clock() - at < LONGEST_WAIT_S for at in begun) for node, begun in self._begun.items()}
        return {node: count for node, count in recent.items() if count and self._wait_s}

    def is_expected(self, node: str) -> bool:
        """Return whether a process may join there soon."""
        return any(self._clock() - at < self._wait_s for at in self._begun.get(node, ()))
