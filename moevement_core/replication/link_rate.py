"""Rate of the links to all peers, from what senders have delivered since the last question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from moevement_core.replication.sender import Sender


class LinkRate:
    """Rate of the links of one rank to all its peers together; for the training thread."""

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[Sender, tuple[int, float]] = WeakKeyDictionary()
        """Bytes and seconds of each sender when it was last asked."""
        self._bytes_per_s = math.inf

    def take(self, senders: Sequence[Sender], needed_bytes_per_s: float) -> float:
        """Return bytes per second; infinite without peers.

        Sends are spread over time, so how fast they were says less than what senders have learned of their link.

        A peer that has acknowledged nothing since the last call is behind a link that carries less than is sent, who
        knows how much less: then the rate is half of what it was, or of what is needed, whichever is less.

        Args:
            senders: one for each peer.
            needed_bytes_per_s: what is sent to all peers together now, on average.
        """
        rates = []
        for sender in senders:
            nbytes, seconds = self._before.get(sender, (0, 0.0))
            if sender.send_s > seconds:
                measured = (sender.sent_bytes - nbytes) / (sender.send_s - seconds)
                learned = sender.spread.link_bytes_per_s
                rates.append(learned if math.isfinite(learned) else measured)
            self._before[sender] = (sender.sent_bytes, sender.send_s)
        if len(rates) < len(senders):
            self._bytes_per_s = min(self._bytes_per_s, needed_bytes_per_s) / 2
        else:
            self._bytes_per_s = sum(rates) if rates else math.inf
        return self._bytes_per_s
