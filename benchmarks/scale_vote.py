"""Real ranks that vote before an update, for the benchmark ``scale``: each is a process with a tree of connections."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import dataclass
from typing import Any

from moevement_core.comms.connections import Connections
from moevement_core.comms.tree import FAN_OUT, TreeGroup

VOTES = 500
RANKS = (FAN_OUT + 1, FAN_OUT * FAN_OUT + FAN_OUT + 1)
"""Numbers of ranks of trees of one and of two levels below the root."""


@dataclass(frozen=True)
class Vote:
    """Cost of a vote of some ranks."""

    ranks: int
    seconds: float
    """Seconds from the vote of a rank until it has the answer, median over ranks and votes."""
    cpu_s: float
    """Processor time of a vote on the rank that takes the most."""


def measure_vote(ranks: int) -> Vote:
    """Let processes vote many times, and return the cost of a vote."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=_vote, args=(rank, there), daemon=True) for rank, (_, there) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    addresses = [here.recv() for here, _ in pipes]
    for here, _ in pipes:
        here.send(addresses)
    results = [here.recv() for here, _ in pipes]
    for process in processes:
        process.join()
    return Vote(ranks, statistics.median(wall for wall, _ in results), max(cpu for _, cpu in results))


def _vote(rank: int, pipe: Any) -> None:
    connections = Connections("127.0.0.1")
    pipe.send(connections.address)
    addresses = pipe.recv()
    connections.open(rank, addresses)
    group = TreeGroup(range(len(addresses)), rank, connections.channel("job"))
    group.ask_once(lambda: False)  # makes the connections
    cpu, seconds = time.process_time(), []
    for _ in range(VOTES):
        began = time.perf_counter()
        group.ask_once(lambda: False)
        seconds.append(time.perf_counter() - began)
    pipe.send((statistics.median(seconds), (time.process_time() - cpu) / VOTES))
    connections.close()
