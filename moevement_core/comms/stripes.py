"""Stripes of one direction's bytes over several connections: each stripe takes the next connection.

One TCP stream that one thread fills carries some 10 to 20 Gbit/s. The connection of a byte follows from its position
among all bytes of its sender, receiver and tag. So both sides know it, whatever pieces they send and receive.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

import torch

STRIPE_BYTES = 1 << 20


class Stripes:
    """Positions in all directions of one channel, on one rank.

    Args:
        streams: number of connections of each direction, 1 or more.
    """

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._positions = defaultdict[Hashable, int](int)

    def carry(self, direction: Hashable, data: torch.Tensor, move: Callable[[int, memoryview], None]) -> None:
        """Send or receive ``data`` over several connections at once; return when all of it has been moved.

        Args:
            direction: sender or receiver, and tag. Only one thread at a time may call this for each direction.
            data: flat host bytes, uint8.
            move: function that sends from, or receives into, a view over the connection with a number.

        Raises:
            Exception: first error of ``move``, once no connection of this call moves bytes any more.
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
