"""Rate of the links from a rank to all its peers, measured from acknowledged sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from moevement_core.replication.sender import Sender


class LinkRate:
    """Meter of the total rate of a rank's links to its peers. Only the training thread uses it."""

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[Sender, tuple[int, float]] = WeakKeyDictionary()
        """Acknowledged bytes and send seconds of each sender at the last call of :meth:`take`."""
        self._bytes_per_s = math.inf
        self._has_taken = False
        """True after the first call of :meth:`take`. Senders that appear later belong to a new generation."""

    def take(self, senders: Sequence[Sender], needed_bytes_per_s: float) -> float:
        """Return the total rate of the links in bytes per second; infinite without peers.

        A send is usually slower than its link, because senders spread snapshots over time. If a sender has learned the
        rate of its link, this method uses that rate. Otherwise the rate of its sends shows only that the link is not
        slower, so an earlier result that was higher stays. A link that becomes slower makes its sender learn that.

        If a peer has acknowledged nothing since the last call, although a snapshot waits for it, its link is too slow,
        but the sends do not show by how much. The result is then half of the smaller of two numbers: the last result,
        and ``needed_bytes_per_s``.

        A peer to which nothing was sent counts as fast as the other peers, and so does a new peer, which has had no
        time to answer. If nothing was sent to any other peer, the last result stays.

        Args:
            senders: one sender for each peer.
            needed_bytes_per_s: mean bytes per second that the links to all peers together have to carry now.
        """
        before = self._bytes_per_s / len(senders) if senders and math.isfinite(self._bytes_per_s) else 0.0
        rates, is_silent = list[float](), False
        for sender in senders:
            is_new = self._has_taken and sender not in self._before
            nbytes, seconds = self._before.get(sender, (0, 0.0))
            if sender.send_s > seconds:
                measured = (sender.sent_bytes - nbytes) / (sender.send_s - seconds)
                learned = sender.spread.link_bytes_per_s
                rates.append(learned if math.isfinite(learned) else max(measured, before))
            else:
                is_silent = is_silent or (sender.is_awaited and not is_new)
            self._before[sender] = (sender.sent_bytes, sender.send_s)
        self._has_taken = True
        if is_silent:
            self._bytes_per_s = min(self._bytes_per_s, needed_bytes_per_s) / 2
        elif rates:
            self._bytes_per_s = sum(rates) * len(senders) / len(rates)
        elif not senders:
            self._bytes_per_s = math.inf
        return self._bytes_per_s
