"""Bytes of one direction over several connections: in stripes, each on the next connection.

One TCP stream that one thread fills brings some 10 to 20 Gbit/s. Which connection a byte takes follows from its
position among all bytes of its sender, receiver and tag, so both sides know it, whatever pieces they send and receive
in.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

import torch

STRIPE_BYTES = 1 << 20


class Stripes:
    """Positions of all directions of one channel, on one rank.

    Args:
        streams: connections of each direction, 1 or more.
    """

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._positions = defaultdict[Hashable, int](int)

    def carry(self, direction: Hashable, data: torch.Tensor, move: Callable[[int, memoryview], None]) -> None:
        """Send or receive ``data``, connections side by side; returns when all of it was moved.

        Args:
            direction: sender or receiver, and tag. One thread at a time calls this for each.
            data: flat host bytes, uint8.
            move: sends from, or receives into, a view over the connection of that number.

        Raises:
            Exception: what ``move`` raised first, when no connection of this call moves anything any more.
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
