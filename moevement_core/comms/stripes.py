"""Distribution of bytes over several connections to one rank: each stripe of bytes takes the next connection.

Several connections are needed on fast links, because one TCP connection that one thread fills carries about 10 to 20
Gbit/s. For each sender, receiver and tag, both sides count the bytes so far. The count alone determines which
connection the next byte takes, so the sender may send pieces of other sizes than the receiver receives.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

import torch

STRIPE_BYTES = 1 << 20
"""Number of consecutive bytes that take the same connection; the next bytes take the next connection."""


class Stripes:
    """Splitter of the bytes that one rank sends, or receives, in one channel.

    Args:
        streams: number of connections for each other rank and tag, 1 or more.
    """

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._positions = defaultdict[Hashable, int](int)

    def carry(self, direction: Hashable, data: torch.Tensor, move: Callable[[int, memoryview], None]) -> None:
        """Send or receive ``data`` over several connections at once; return when all of it has been moved.

        Args:
            direction: rank at the other end, and tag. Only one thread at a time may call this method with one
                direction.
            data: flat host bytes, uint8.
            move: function that takes the number of a connection and a view. Over that connection it sends the view, or
                receives into the view.

        Raises:
            Exception: first error of ``move``, after all calls of ``move`` have ended.
        """
        view = memoryview(data.numpy())
        parts: dict[int, list[memoryview]] = defaultdict(list)
        for stream, part in self._cut(direction, view):
            parts[stream].append(part)
        errors: list[BaseException] = []

        def run(stream: int) -> None:
            try:
                for part in parts[stream]:
                    move(stream, part)
            except Exception as error:
                errors.append(error)

        first, *others = parts or [0]
        threads = [
            threading.Thread(target=run, args=(stream,), name="moevement-stripe", daemon=True) for stream in others
        ]
        for thread in threads:
            thread.start()
        run(first)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _cut(self, direction: Hashable, view: memoryview) -> Iterator[tuple[int, memoryview]]:
        position, done = self._positions[direction], 0
        while done < view.nbytes:
            count = min(STRIPE_BYTES - position % STRIPE_BYTES, view.nbytes - done)
            yield position // STRIPE_BYTES % self._streams, view[done : done + count]
            position, done = position + count, done + count
        self._positions[direction] = position
