"""Backoff for checks that cost time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

SOONEST_S = 1.0
SHARE = 20
"""A look is made again after so many times as long as it took."""


class Now:
    """Something that is looked at when a bell has rung, and now and then without.

    A bell that is heard rings for a change; a stranger may ring it, or keep it from ringing.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next_at = clock, -float("inf")

    def is_due(self, *, rung: bool) -> bool:
        """Return whether to check now.

        Args:
            rung: whether the bell has rung since the last call.
        """
        return rung or self._clock() >= self._next_at

    def __enter__(self) -> Self:
        self._began = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        now = self._clock()
        self._next_at = now + max(SOONEST_S, SHARE * (now - self._began))
