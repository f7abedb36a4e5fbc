"""How fast copies leave: spread over time, so that messages of training do not wait behind them.

A bulk stream that is sent as fast as it can fills the queues of a slow link, and every small message of training waits
in them. Below the rate of the link queues stay empty. That rate is not known, so a sender asks for as much as lets it
be done in a quarter of its time, and for less where that takes longer than it should.
"""

from __future__ import annotations

import math

LEAST, MOST = 0.25, 0.8
"""Shares of the time until more is to be sent over which sends are spread."""
WAITING = 0.5
"""Share of that time until which a send may be put off for training."""
SLOWER, FASTER = 1.5, 0.97
"""Factors by which that share grows where the link was too slow for the rate, and shrinks where it was not."""
LATE = 1.3
"""A send that takes so many times as long as its rate says has met a link, or a peer, that is slower."""
MEASURED_BYTES = 512 << 10
"""A send of fewer bytes says nothing: it is over when the kernel has taken it."""
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
        self._share = LEAST

    def bytes_per_s(self, backlog: int) -> float:
        """Return the rate of the next send.

        Args:
            backlog: snapshots that wait.
        """
        rate = self.needed_bytes_per_s / self._share
        return rate * CATCH_UP if backlog > self.usual_backlog else rate

    def may_wait(self, left_bytes: int, nbytes: int, seconds: float) -> bool:
        """Return whether a send that lets training go first can be over in time all the same.

        Args:
            left_bytes: bytes that are still to be sent.
            nbytes: bytes of the whole send.
            seconds: since it began.
        """
        if math.isinf(self.needed_bytes_per_s):
            return False
        return seconds + left_bytes / self.bytes_per_s(0) < WAITING * nbytes / self.needed_bytes_per_s

    def sent(self, nbytes: int, seconds: float, bytes_per_s: float) -> None:
        """Take in how long a send took.

        Args:
            nbytes: bytes that it brought.
            seconds: from its first byte until the kernel had taken the last one, without pauses and waits for training.
            bytes_per_s: the rate that it had.
        """
        if nbytes < MEASURED_BYTES or math.isinf(bytes_per_s):
            return
        is_late = seconds > LATE * nbytes / bytes_per_s
        self._share = min(MOST, self._share * SLOWER) if is_late else max(LEAST, self._share * FASTER)
