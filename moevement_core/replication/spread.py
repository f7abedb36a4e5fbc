"""Rate at which copies leave: a part of what the link carries, so that messages of training do not wait behind them.

A bulk stream that is sent as fast as it can fills the queues of a slow link, and every small message of training waits
in them: on a link of 100 Mbit/s training stood still while copies left. At a rate well below that of the link queues
stay empty, and the same bytes cost training about half as much. The rate of the link is learned from the sends
themselves: now and then one leaves as fast as it can, and one that takes longer than its rate says has met the link.
"""

from __future__ import annotations

import math

TIME_SHARE = 0.8
"""Share of the time until more is to be sent that a send may take."""
LINK_SHARE = 0.4
"""Share of the link's rate that a send takes where it has the time for it."""
LATE = 1.3
"""A send that takes so many times as long as its rate says has met a link, or a peer, that is slower."""
TRIED_EVERY = 32
"""Every how many sends one leaves as fast as it can: a link that was slow may be quick again."""
MEASURED_BYTES = 512 << 10
"""A send of fewer bytes says nothing: most of its time goes into the answers of the peer."""
CATCH_UP = 2.0
"""Factor of the rate of a sender that has fallen behind."""


class Spread:
    """Rate of one sender.

    The training thread sets :attr:`needed_bytes_per_s` and :attr:`usual_backlog`; everything else is of the sender's
    thread.
    """

    def __init__(self) -> None:
        self.needed_bytes_per_s = math.inf
        """Bytes of snapshots that come per second, on average; infinite while that is not known."""
        self.usual_backlog = 1
        """Snapshots that may wait without the sender having fallen behind: those of a window."""
        self.link_bytes_per_s = math.inf
        """Rate of the link for this sender, as far as sends have shown; infinite before one has."""
        self._sends = 0

    def bytes_per_s(self, backlog: int) -> float:
        """Return the rate of the next send; infinite while nothing is known, and to try the link.

        Args:
            backlog: snapshots that wait.
        """
        if self._sends % TRIED_EVERY == TRIED_EVERY - 1:
            return math.inf
        of_link = LINK_SHARE * self.link_bytes_per_s if math.isfinite(self.link_bytes_per_s) else 0.0
        rate = max(self.needed_bytes_per_s / TIME_SHARE, of_link)
        return rate * CATCH_UP if backlog > self.usual_backlog else rate

    def sent(self, nbytes: int, seconds: float, bytes_per_s: float) -> None:
        """Take in how long a send took.

        Args:
            nbytes: bytes that it brought.
            seconds: until the peer had acknowledged it, without pauses.
            bytes_per_s: the rate that it had; infinite: it was sent as fast as it could be.
        """
        self._sends += 1
        if nbytes >= MEASURED_BYTES and seconds * bytes_per_s > LATE * nbytes:
            self.link_bytes_per_s = nbytes / seconds
