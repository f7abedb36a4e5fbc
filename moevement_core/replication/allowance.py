"""Host memory of a rank: one allowance for its own snapshots, its boundary log, and the copies for other ranks."""

from __future__ import annotations

import threading
from collections.abc import Collection

Who = str | int | tuple[int, ...]
"""Purpose of memory: :data:`OWN` for own snapshots, :data:`LOG` for the boundary log, or a source.

A source is a rank whose snapshots this rank keeps, or a tuple of ranks whose parity this rank keeps.
"""
OWN, LOG = "own", "log"


class Allowance:
    """Host memory that a rank may use, and the bytes that each purpose takes of it. Any thread may use this object.

    The purposes are own snapshots, the boundary log, and each source: a rank whose snapshots this rank keeps. Sources
    have no fixed shares, because one source may need more than an equal share while another needs less.

    Args:
        total_bytes: bytes for all purposes together; infinite without a cap.
    """

    def __init__(self, total_bytes: float) -> None:
        self.total_bytes = total_bytes
        self._taken: dict[Who, float] = {}
        self._lock = threading.Lock()

    def left_for(self, source: Who) -> float:
        """Return the bytes that ``source`` may use in all: those that it uses now, and those that nobody uses."""
        with self._lock:
            return self._left_for(source)

    def of(self, purpose: Who) -> float:
        """Return the bytes that ``purpose`` uses."""
        with self._lock:
            return self._taken.get(purpose, 0.0)

    def take(self, source: Who, nbytes: int) -> bool:
        """Record that ``source`` uses ``nbytes`` in all, and return True.

        If less than ``nbytes`` is left for the source, the method returns False and changes nothing.
        """
        with self._lock:
            if nbytes > self._left_for(source):
                return False
            self._taken[source] = nbytes
            return True

    def keep(self, source: Who, nbytes: float) -> None:
        """Record that ``source`` uses ``nbytes``, even beyond the allowance, because they are already allocated."""
        with self._lock:
            self._taken[source] = nbytes

    def forget_sources(self, but: Collection[Who]) -> None:
        """Forget the bytes of all sources except ``but``; the bytes of own snapshots and of the log stay recorded."""
        with self._lock:
            self._taken = {
                purpose: taken for purpose, taken in self._taken.items() if isinstance(purpose, str) or purpose in but
            }

    def _left_for(self, source: Who) -> float:
        return self.total_bytes - sum(taken for other, taken in self._taken.items() if other != source)
