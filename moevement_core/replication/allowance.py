"""Host memory of a rank: one allowance for its own snapshots, its log, and copies for all sources together."""

from __future__ import annotations

import threading
from collections.abc import Collection

Who = str | int | tuple[int, ...]
"""Purpose of memory: :data:`OWN` snapshots, the :data:`LOG`, copies of a rank, or parity of several ranks."""
OWN, LOG = "own", "log"


class Allowance:
    """Host memory that is allowed, and how much of it each purpose has taken. Safe to use from several threads.

    Not a share for each source: sources differ in size, and what one of them needs more than an equal share another one
    needs less.

    Args:
        total_bytes: for everything; infinite without a cap.
    """

    def __init__(self, total_bytes: float) -> None:
        self.total_bytes = total_bytes
        self._taken: dict[Who, float] = {}
        self._lock = threading.Lock()

    def left_for(self, source: Who) -> float:
        """Bytes that ``source`` may have, what it has already among them."""
        with self._lock:
            return self._left_for(source)

    def of(self, who: Who) -> float:
        """Bytes that ``who`` has."""
        with self._lock:
            return self._taken.get(who, 0.0)

    def take(self, source: Who, nbytes: int) -> bool:
        """Let ``source`` have ``nbytes`` instead of what it has; whether they are allowed. If not, it keeps that."""
        with self._lock:
            if nbytes > self._left_for(source):
                return False
            self._taken[source] = nbytes
            return True

    def keep(self, source: Who, nbytes: float) -> None:
        """``source`` has ``nbytes`` from before, allowed or not."""
        with self._lock:
            self._taken[source] = nbytes

    def forget_sources(self, but: Collection[Who]) -> None:
        """Nothing is kept of sources any more, but of these."""
        with self._lock:
            self._taken = {
                purpose: taken for purpose, taken in self._taken.items() if isinstance(purpose, str) or purpose in but
            }

    def _left_for(self, source: Who) -> float:
        return self.total_bytes - sum(taken for other, taken in self._taken.items() if other != source)
