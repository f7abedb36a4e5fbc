"""Pauses between reads of values that are slow to read, such as the values of all members in the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

SOONEST_S = 1.0
"""Shortest pause between two reads of a value in the store, in seconds."""
RUNG_SHARE = 2
"""Ratio of the pause after a read to the duration of the read while writers keep signalling new values.

Without this pause, reads of thousands of values would follow each other at once, and leases would wait.
"""
SHARE = 20
"""Ratio of the pause after a read to the duration of the read, so that reads take at most a twentieth of the time."""


ASKED_PER_S = 1000
"""Questions a second that all ranks together may ask the store while they wait for something."""
LONGEST_S = 10.0
"""Longest pause between two questions of a rank, in seconds."""


def question_pause_s(ranks: int, least_s: float) -> float:
    """Return the pause in seconds between two questions of a rank to the store, longer in larger jobs.

    A rank asks if the job has ended, or if its generation is over, while it waits for a value. The store reports the
    value itself at once, so the pause delays only this news.

    Args:
        ranks: number of ranks of the job; 0 if it is unknown.
        least_s: pause in small jobs, in seconds.
    """
    return max(least_s, min(ranks / ASKED_PER_S, LONGEST_S))


class Backoff:
    """Schedule for reads of a value in the store. A read is due when a writer signals a new value, or after a pause.

    The caller enters the object as a context manager around each read. To signal a new value, a writer changes a second
    key, the *bell* of the value (:meth:`SignedStore.ring`). Readers do not rely on the bell alone, because a process
    without the job's token may change the bell, or may undo a change before a reader sees it.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at = self._soonest_at = -float("inf")
        self._is_rung = False
        """True if a writer has signalled a new value that was not read yet."""

    def is_due(self, *, rung: bool) -> bool:
        """Return True if a read is due now.

        Args:
            rung: True if a writer has signalled a new value since the last call.
        """
        self._is_rung |= rung
        return self._clock() >= (self._soonest_at if self._is_rung else self._next_at)

    def __enter__(self) -> Self:
        self._began, self._is_rung = self._clock(), False
        return self

    def __exit__(self, *error: object) -> None:
        now = self._clock()
        self._next_at = now + max(SOONEST_S, SHARE * (now - self._began))
        self._soonest_at = now + RUNG_SHARE * (now - self._began)
