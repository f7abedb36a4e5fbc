"""A pause of background work: digests and sends look at it before each piece of their work."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_STEP_S, LONGEST_STEP_S = 0.002, 0.05
"""Seconds between two looks of a thread that pauses."""
STEP_SHARE = 0.02
"""The same as a share of how long a pause is expected to last: looks of many threads would slow the iteration that is
to be quiet."""


class Pause:
    """Pause that the training thread begins and ends, and background threads keep to.

    It is a plain attribute that threads poll: a lock could stay taken where a restart's exception reaches the training
    thread (:mod:`moevement_core.util.gate`).
    """

    def __init__(self) -> None:
        self._until_s = 0.0
        self.step_s = SHORTEST_STEP_S
        """Seconds between two looks."""

    @property
    def is_on(self) -> bool:
        """True while background work pauses."""
        return time.monotonic() < self._until_s

    def begin(self, limit_s: float, expected_s: float = 0.0) -> None:
        """Begin a pause of background work.

        Args:
            limit_s: seconds after which the pause ends by itself, so that no copy waits for a rank that hangs.
            expected_s: seconds that it will probably last; 0 where that is not known.
        """
        self.step_s = min(max(SHORTEST_STEP_S, STEP_SHARE * expected_s), LONGEST_STEP_S)
        self._until_s = time.monotonic() + limit_s

    def end(self) -> bool:
        """End; return whether the pause lasted until now."""
        has_lasted, self._until_s = self.is_on, 0.0
        return has_lasted

    def wait(self, must_go_on: Callable[[], bool]) -> None:
        """Block while the pause is on and ``must_go_on`` is false; for background threads."""
        while self.is_on and not must_go_on():
            time.sleep(self.step_s)
