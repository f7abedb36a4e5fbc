"""Rate at which copies are sent: a share of the link's rate, so that messages of training do not wait behind copies.

Copies at full speed fill the queues of a slow link, and every small message of training waits in these queues. On a
link of 100 Mbit/s, training stood still while copies were sent at full speed. At a rate well below the link's rate, the
queues stay empty, and copies delay training about half as much as at full speed. A sender learns the rate of the link
from its sends:

- One of every :data:`TRIED_EVERY` sends runs at full speed.
- If a send takes longer than its rate implies, the link was slower than that rate. The speed of the send then counts as
  the rate of the link.
"""

from __future__ import annotations

import math

TIME_SHARE = 0.8
"""Share of the time until the next snapshot that a send may take."""
LINK_SHARE = 0.4
"""Share of the link's rate at which a send runs, unless the send must be faster to end in time."""
LATE = 1.3
"""Ratio of the measured seconds of a send to those that its rate implies. Above this ratio, the link or the peer was
slower than the rate."""
TRIED_EVERY = 32
"""Number of sends from one full-speed send to the next. Only a full-speed send shows that a link has become faster."""
MEASURED_BYTES = 512 << 10
"""Fewest bytes of a send from which the link's rate is computed. A smaller send mostly waits for the peer's answers."""
CATCH_UP = 2.0
"""Factor by which a sender that has fallen behind raises its rate."""


class Spread:
    """Choice of the rate at which one sender sends.

    The training thread sets :attr:`needed_bytes_per_s` and :attr:`usual_backlog`. Only the sender's thread calls the
    methods.
    """

    def __init__(self) -> None:
        self.needed_bytes_per_s = math.inf
        """Mean bytes of new snapshots per second; infinite while unknown."""
        self.usual_backlog = 1
        """Number of snapshots of a window. If more snapshots wait, the sender raises its rate."""
        self.link_bytes_per_s = math.inf
        """Newest measured rate of the link in bytes per second; infinite before the first measurement."""
        self._sends = 0

    def bytes_per_s(self, backlog: int) -> float:
        """Return the rate of the next send in bytes per second; infinite for full speed.

        Args:
            backlog: number of snapshots in the sender's queue.
        """
        if self._sends % TRIED_EVERY == TRIED_EVERY - 1:
            return math.inf
        of_link = LINK_SHARE * self.link_bytes_per_s if math.isfinite(self.link_bytes_per_s) else 0.0
        rate = max(self.needed_bytes_per_s / TIME_SHARE, of_link)
        return rate * CATCH_UP if backlog > self.usual_backlog else rate

    def sent(self, nbytes: int, seconds: float, bytes_per_s: float) -> None:
        """Record how long a send took.

        Args:
            nbytes: payload bytes of the send.
            seconds: seconds until the peer had acknowledged the send, pauses excluded.
            bytes_per_s: rate of the send in bytes per second; infinite for a full-speed send.
        """
        self._sends += 1
        if nbytes >= MEASURED_BYTES and seconds * bytes_per_s > LATE * nbytes:
            self.link_bytes_per_s = nbytes / seconds
