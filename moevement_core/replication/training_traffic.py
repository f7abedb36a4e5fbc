"""What training sends over TCP from this process: copies of snapshots let it go first.

A link that is shared is no faster for a copy that goes beside a message of training, and the message takes twice as
long. A rank's training is silent for a part of each iteration, and that part is enough for most copies. The kernel
knows which it is: a connection has bytes that were sent and not acknowledged yet. What goes over verbs (NCCL over
InfiniBand) is not seen here; copies do not travel there either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container
from contextlib import suppress

from moevement_core.tcp import connections, moved, unacknowledged

LISTED_EVERY_S = 1.0
"""Seconds between two lists of this process's connections, at least: process groups are made and destroyed."""
LIST_SHARE = 1e-3
"""Share of a processor's time that lists take at most: over gloo a rank of thousands has thousands of connections."""
USED_S = 60.0
"""Seconds after which a connection over which nothing went is looked at no more: gloo has one to each rank."""
SMALL_BYTES = 64 << 10
"""Bytes over a connection that is new here from which on it carries more than greetings."""


class TrainingTraffic:
    """Connections of this process that training sends over; for any threads.

    A list costs some microseconds for each connection. Between two lists only those are asked that were used lately.

    Args:
        host: address of this host that copies leave from; what leaves from another one does not meet them.
        own: descriptors of connections that carry copies, by whoever made them; asked for with every list.
    """

    def __init__(self, host: str, own: Callable[[], Container[int]]) -> None:
        self._host, self._own = host, own
        self._due_s = -math.inf
        """When connections are listed next."""
        self._used: tuple[int, ...] = ()
        """Descriptors of connections that were used lately. One may be closed by now, and be something else."""
        self._seen: dict[int, tuple[int, float]] = {}
        """By descriptor, bytes that went over it, and when they had become more."""

    @property
    def is_leaving(self) -> bool:
        """Whether bytes of training are on their way from here; False where that cannot be known now."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + LISTED_EVERY_S  # for other threads meanwhile
            began_s = time.thread_time()
            with suppress(OSError):  # no descriptor is left: what was known before has to do
                self._list(now_s)
            self._due_s = now_s + max(LISTED_EVERY_S, (time.thread_time() - began_s) / LIST_SHARE)
        return any(unacknowledged(descriptor) for descriptor in self._used)

    def _list(self, now_s: float) -> None:
        own, before, seen = self._own(), self._seen, dict[int, tuple[int, float]]()
        for one in connections():
            if one.descriptor in own or one.ends.local[0] != self._host or (count := moved(one.duplicate)) is None:
                continue
            arrived, _ = count
            nbytes, used_s = before.get(one.descriptor, (None, -math.inf))
            is_used = arrived >= SMALL_BYTES if nbytes is None else arrived != nbytes
            seen[one.descriptor] = (arrived, now_s if is_used else used_s)
        self._seen = seen
        self._used = tuple(one for one, (_, used_s) in seen.items() if now_s - used_s < USED_S)
