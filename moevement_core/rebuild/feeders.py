"""Threads of survivors that feed replaying neighbours from boundary logs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.boundary_log import Direction
from moevement_core.recovery.feed import feed
from moevement_core.topology.parts import RankParts


class Feeder(threading.Thread):
    """Thread that feeds one neighbour in one direction.

    Args:
        parts: objects of this rank that a recovery uses.
        peer: rank that is fed.
        direction: direction of the fed tensors.
        iterations: iterations that the neighbour replays.
    """

    def __init__(self, parts: RankParts, peer: int, direction: Direction, iterations: Sequence[int]) -> None:
        super().__init__(name=f"moevement-feed-{peer}-{direction.name.lower()}", daemon=True)
        self.fed_bytes = 0
        self._error: Exception | None = None
        self._parts, self._peer, self._direction, self._iterations = parts, peer, direction, iterations
        self.start()

    def run(self) -> None:
        """Send the logged tensors of all iterations. This method is the body of the thread."""
        log, transport = self._parts.binding.boundary_log, self._parts.topology.channels.feeds
        assert log is not None
        assert transport is not None
        try:
            self.fed_bytes = feed(
                rank=self._parts.topology.rank,
                peer=self._peer,
                direction=self._direction,
                iterations=self._iterations,
                log=log,
                transport=transport,
            )
        except Exception as error:  # finish() raises the error on the training thread
            self._error = error

    def finish(self) -> None:
        """Wait until all tensors are sent.

        Raises:
            Exception: sending failed, for example because the neighbour failed.
        """
        self.join()
        if self._error is not None:
            raise self._error


def start_feeders(parts: RankParts, prepared: Prepared) -> list[Feeder]:
    """Start a feeder for each neighbour that replays, if this rank does not replay."""
    if prepared.own_plan is not None:
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
