"""Backoff of looks at values that take time to read, such as the values of all members in the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

SOONEST_S = 1.0
"""Seconds of backoff at least."""
SHARE = 20
"""Ratio of the backoff to the duration of the last look, so that looks take at most a twentieth of the time."""


class Backoff:
    """Schedule of looks at a value: a look is due when the value's bell has rung, and otherwise after a backoff.

    The caller enters the object as a context manager around each look. The writer of a value rings its bell. The bell
    alone does not suffice, because a stranger may ring it or keep it from ringing.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next_at = clock, -float("inf")

    def is_due(self, *, rung: bool) -> bool:
        """Return True if a look is due now.

        Args:
            rung: True if the bell has rung since the last call.
        """
        return rung or self._clock() >= self._next_at

    def __enter__(self) -> Self:
        self._began = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        now = self._clock()
        self._next_at = now + max(SOONEST_S, SHARE * (now - self._began))
