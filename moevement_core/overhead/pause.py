"""Pause of background work. A thread that computes digests or sends copies checks for a pause before each step."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_STEP_S, LONGEST_STEP_S = 0.002, 0.05
"""Least and most seconds after which a pausing thread checks again whether the pause has ended."""
STEP_SHARE = 0.02
"""Time between two checks of a pausing thread, as a share of the expected pause. More frequent checks by many threads
would slow down the iteration that is being measured."""


class Pause:
    """Pause of background threads. The training thread begins and ends the pause.

    The background threads poll a plain attribute instead of a lock. A restart raises an exception in the training
    thread, which could leave a lock locked forever (:mod:`moevement_core.util.gate` explains this).
    """

    def __init__(self) -> None:
        self._until_s = 0.0
        self.step_s = SHORTEST_STEP_S
        """Seconds between two checks of a pausing thread."""

    @property
    def is_on(self) -> bool:
        """True while background work pauses."""
        return time.monotonic() < self._until_s

    def begin(self, limit_s: float, expected_s: float = 0.0) -> None:
        """Begin a pause of background work.

        Args:
            limit_s: seconds after which the pause ends by itself, so that no copy waits for a rank that hangs.
            expected_s: expected length of the pause in seconds; 0 if unknown.
        """
        self.step_s = min(max(SHORTEST_STEP_S, STEP_SHARE * expected_s), LONGEST_STEP_S)
        self._until_s = time.monotonic() + limit_s

    def end(self) -> bool:
        """End the pause; return False if it had already ended by itself."""
        has_lasted, self._until_s = self.is_on, 0.0
        return has_lasted

    def wait(self, must_go_on: Callable[[], bool]) -> None:
        """Block the calling background thread until the pause ends, or ``must_go_on()`` returns True."""
        while self.is_on and not must_go_on():
            time.sleep(self.step_s)
