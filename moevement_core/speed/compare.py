"""Comparison of the speeds of all ranks: which are slower than their peers, in which phase, and by which factor.

The peers of a rank are the other ranks of its pipeline stage, which do the same work. A rank is slow if its own work
took longer than that of its peers by a given factor in each of several blocks of iterations. So a pause does not make a
rank slow, nor does a load that moves from rank to rank, such as that of a popular expert.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevement_core.speed.phases import PHASES

BLOCKS, BLOCK = 4, 5
"""Number of blocks that are compared, and of iterations in a block."""
EVERY = BLOCKS * BLOCK
"""Iterations from one comparison to the next."""
LINK_FACTOR = 3.0
"""Factor by which a link must be slower than those of other ranks. Rates of links vary more than times of work."""
SENDING = "sending"
"""Phase of a rank whose links are slow."""

_HEADER = struct.Struct("<iHH")
_LINK = struct.Struct("<Id")


@dataclass(frozen=True)
class RankSpeed:
    """Speed of a rank in the last :data:`EVERY` iterations, which each rank reports."""

    pid: int
    """Process id of the rank."""
    seconds: tuple[tuple[float, ...], ...] = ()
    """Seconds of own work in each block and phase; empty if the rank has not timed all of these iterations."""
    links: tuple[tuple[int, float], ...] = ()
    """Peer and measured bytes per second of each link to a peer; infinite if the link keeps up with what is sent."""

    def encode(self) -> bytes:
        """Return the report as bytes."""
        flat = [second for block in self.seconds for second in block]
        head = _HEADER.pack(self.pid, len(flat), len(self.links))
        return b"".join([head, struct.pack(f"<{len(flat)}f", *flat), *(_LINK.pack(*link) for link in self.links)])

    @staticmethod
    def decode(data: bytes) -> RankSpeed:
        """Return the report that :meth:`encode` has encoded."""
        pid, count, links = _HEADER.unpack_from(data)
        at = _HEADER.size + 4 * count
        flat = struct.unpack_from(f"<{count}f", data, _HEADER.size)
        blocks = tuple(flat[first : first + len(PHASES)] for first in range(0, count, len(PHASES)))
        return RankSpeed(pid, blocks, tuple(_LINK.unpack_from(data, at + n * _LINK.size) for n in range(links)))


@dataclass(frozen=True)
class Slowness:
    """Comparison of one rank with its peers."""

    phase: str
    """Phase in which the rank loses most."""
    factor: float
    """Time of the rank divided by that of its peers."""
    least: float
    """Smallest factor in any of the blocks."""


def compare(speeds: Sequence[RankSpeed], stages: Sequence[int]) -> dict[int, Slowness]:
    """Compare the own work of each rank with that of its peers, in O(N log N).

    Args:
        speeds: speed of each rank.
        stages: pipeline stage of each rank.

    Returns:
        Comparison of each rank that has reported its times and has peers that have.
    """
    timed = defaultdict[int, list[int]](list)
    for rank, speed in enumerate(speeds):
        if len(speed.seconds) == BLOCKS:
            timed[stages[rank]].append(rank)
    compared = {}
    for ranks in timed.values():
        if len(ranks) < 2:
            continue
        seconds = np.array([speeds[rank].seconds for rank in ranks])  # [ranks, blocks, phases]
        by_block = _ratio(seconds.sum(axis=2))
        whole, phases = _ratio(seconds.sum(axis=(1, 2))), seconds.sum(axis=1)
        excess = phases - _of_peers(phases)
        for index, rank in enumerate(ranks):
            phase = PHASES[int(excess[index].argmax())]
            compared[rank] = Slowness(phase, float(whole[index]), float(by_block[index].min()))
    return compared


def compare_links(speeds: Sequence[RankSpeed], nodes: Sequence[str]) -> dict[int, Slowness]:
    """Compare the links of all nodes, and return the ranks on those that explain why links are slow.

    A node whose links are slow in both directions explains more of them than its neighbours. So the node with the most
    slow links is taken first, then the one with the most of the rest. A link that either end may explain counts for the
    sender.

    Args:
        speeds: speed of each rank.
        nodes: node of each rank.
    """
    rates = [
        (rank, peer, rate) for rank, speed in enumerate(speeds) for peer, rate in speed.links
        if nodes[peer] != nodes[rank]
    ]  # fmt: skip
    if len(rates) < 2:
        return {}
    others = _of_peers(np.array([1 / rate for _, _, rate in rates]))  # a link that keeps up counts as 0
    slow = {
        (rank, peer): 1 / (rate * usual) for (rank, peer, rate), usual in zip(rates, others, strict=True)
        if usual > 0 and math.isfinite(rate) and 1 / (rate * usual) >= LINK_FACTOR
    }  # fmt: skip
    compared = dict[int, Slowness]()
    while slow:
        ends = defaultdict[str, float](float)
        for rank, peer in slow:
            ends[nodes[rank]] += 1
            ends[nodes[peer]] += 0.99  # less than a sender's, so that the sender explains what either may
        worst = max(sorted(ends), key=ends.__getitem__)
        factor = max(factor for link, factor in slow.items() if worst in (nodes[link[0]], nodes[link[1]]))
        for rank, node in enumerate(nodes):
            if node == worst:
                compared[rank] = Slowness(SENDING, factor, factor)
        slow = {link: value for link, value in slow.items() if worst not in (nodes[link[0]], nodes[link[1]])}
    return compared


def slowest(compared: Mapping[int, Slowness]) -> tuple[int, float] | None:
    """Return the rank with the largest factor, and the factor; None without a comparison."""
    if not compared:
        return None
    rank = max(compared, key=lambda rank: compared[rank].factor)
    return rank, compared[rank].factor


def _ratio(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    usual = _of_peers(seconds)
    return np.divide(seconds, usual, out=np.ones_like(seconds), where=usual > 0)


def _of_peers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lower median of all other values along the first axis, for each value."""
    count = len(values)
    ranked = np.sort(values, axis=0)
    low = (count - 2) // 2
    place = np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0, kind="stable")
    return np.where(place > low, ranked[low], ranked[low + 1])
