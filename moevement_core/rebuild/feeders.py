"""Ranks that keep their state feed neighbours that replay, from their boundary logs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.boundary_log import Direction
from moevement_core.recovery.feed import feed
from moevement_core.topology.parts import Parts


class Feeder(threading.Thread):
    """Feeds one neighbour in one direction."""

    def __init__(self, parts: Parts, peer: int, direction: Direction, iterations: Sequence[int]) -> None:
        super().__init__(name=f"moevement-feed-{peer}-{direction.name.lower()}", daemon=True)
        self.fed_bytes = 0
        self._error: Exception | None = None
        self._parts, self._peer, self._direction, self._iterations = parts, peer, direction, iterations
        self.start()

    def run(self) -> None:
        """Feed; on the thread."""
        log, transport = self._parts.binding.boundary_log, self._parts.topology.channels.feeds
        assert log is not None
        assert transport is not None
        try:
            self.fed_bytes = feed(
                self._parts.topology.rank, self._peer, self._direction, self._iterations, log, transport
            )
        except Exception as error:  # shown on the training thread
            self._error = error

    def finish(self) -> None:
        """Wait until everything is fed.

        Raises:
            Exception: it could not be; the one that is fed has died, maybe.
        """
        self.join()
        if self._error is not None:
            raise self._error


def start_feeders(parts: Parts, prepared: Prepared) -> list[Feeder]:
    """Start a feeder for each neighbour that replays, if this rank does not replay."""
    if prepared.mine is not None:
        return []
    feeders = []
    for neighbour, direction in (
        (parts.topology.neighbours.after, Direction.FORWARD),
        (parts.topology.neighbours.before, Direction.BACKWARD),
    ):
        for plan in prepared.plans:
            if neighbour is not None and neighbour.stage in plan.runs and plan.iterations:
                feeders.append(Feeder(parts, neighbour.rank, direction, plan.iterations))
    return feeders
