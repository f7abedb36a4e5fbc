"""Transport between threads of one process, whose traffic a test can inspect, damage, stop or cut."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from moevement_core.comms.transport import Transport
from moevement_core.snapshot.agreement import Agreed, Agreement, RunStatus, Writing

CLOSED = "connection closed by peer"


class Wire:
    """Queues of the data that all ranks send each other."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int, int], queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()
        self.damage: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda source, peer, data: data
        """Function of source, peer and data that returns the data that arrive."""
        self.stopped: dict[int, threading.Event] = {}
        """Event of each stopped rank, which sends nothing until the event is set."""
        self.cut: set[int] = set()
        """Ranks whose connections are broken."""

    def queue(self, source: int, peer: int, tag: int) -> queue.SimpleQueue:
        with self._lock:
            return self._queues[source, peer, tag]


class Loopback(Transport):
    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        if stopped := self._wire.stopped.get(self._rank):
            stopped.wait()
        if self._wire.cut & {self._rank, peer}:
            raise RuntimeError(CLOSED)
        self._wire.queue(self._rank, peer, tag).put(self._wire.damage(self._rank, peer, data.clone()))

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        while True:
            if self._wire.cut & {self._rank, peer}:
                raise RuntimeError(CLOSED)
            try:
                received = self._wire.queue(peer, self._rank, tag).get(timeout=0.02)
            except queue.Empty:
                continue
            assert received.numel() == data.numel(), "sizes are agreed on beforehand"
            data.copy_(received)
            return


class SharedAgreement(Agreement):
    """Agreement of ranks that one thread steps in turn. Its results come an iteration late, as in a real job."""

    def __init__(self, ranks: int, board: dict[int, dict[int, Mapping[int, RunStatus]]], rank: int) -> None:
        self._ranks, self._board, self._rank = ranks, board, rank
        self._iteration: int | None = None

    def propose(self, iteration: int, statuses: Mapping[int, RunStatus], writing: Writing = Writing.NOTHING) -> None:
        self._board.setdefault(iteration, {})[self._rank] = dict(statuses)
        self._iteration = iteration

    def agreed(self) -> Agreed | None:
        if self._iteration is None:
            return None
        reports = self._board[self._iteration].values()
        assert len(reports) == self._ranks
        starts = set[int]().union(*reports)
        lowest = {start: min(report.get(start, RunStatus.NEVER) for report in reports) for start in starts}
        return Agreed(self._iteration, {start: value for start, value in lowest.items() if value})
