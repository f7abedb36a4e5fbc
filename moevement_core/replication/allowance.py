"""Host memory that a rank gives to copies of others' snapshots: one allowance for all sources together."""

from __future__ import annotations

import threading


class Allowance:
    """How much is allowed, and who has taken what of it. Safe to use from several threads.

    Not a share for each source: sources differ in size, and what one of them needs more than an equal share another one
    needs less.

    Args:
        total_bytes: for all sources; infinite without a cap.
    """

    def __init__(self, total_bytes: float) -> None:
        self.total_bytes = total_bytes
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()

    def left_for(self, source: int) -> float:
        """Bytes that ``source`` may have, what it has already among them."""
        with self._lock:
            return self._left_for(source)

    def take(self, source: int, nbytes: int) -> bool:
        """Let ``source`` have ``nbytes`` instead of what it has; whether they are allowed. If not, it keeps that."""
        with self._lock:
            if nbytes > self._left_for(source):
                return False
            self._taken[source] = nbytes
            return True

    def keep(self, source: int, nbytes: int) -> None:
        """``source`` has ``nbytes`` from before, allowed or not."""
        with self._lock:
            self._taken[source] = nbytes

    def _left_for(self, source: int) -> float:
        return self.total_bytes - sum(taken for other, taken in self._taken.items() if other != source)
