"""Pauses between reads of values that are slow to read, such as the values of all members in the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

SOONEST_S = 1.0
"""Shortest pause between two reads of a value in the store, in seconds."""
SHARE = 20
"""Ratio of the pause after a read to the duration of the read, so that reads take at most a twentieth of the time."""


class Backoff:
    """Schedule for reads of a value in the store. A read is due when a writer signals a new value, or after a pause.

    The caller enters the object as a context manager around each read. To signal a new value, a writer changes a second
    key, the *bell* of the value (:meth:`SignedStore.ring`). Readers do not rely on the bell alone, because a process
    without the job's token may change the bell, or may undo a change before a reader sees it.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next_at = clock, -float("inf")

    def is_due(self, *, rung: bool) -> bool:
        """Return True if a read is due now.

        Args:
            rung: True if a writer has signalled a new value since the last call.
        """
        return rung or self._clock() >= self._next_at

    def __enter__(self) -> Self:
        self._began = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        now = self._clock()
        self._next_at = now + max(SOONEST_S, SHARE * (now - self._began))
