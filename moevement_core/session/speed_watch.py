"""Watch over the speed of ranks, as one rank sees it: its clock, the comparison with the others, and what follows.

Every 20 iterations, each rank passes about 60 bytes up a tree to rank 0, which compares all ranks in O(N log N). What
has changed passes down. So a rank sends what the ranks below it in the tree have given, and rank 0 reads N reports.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from moevement_core.device import Device
from moevement_core.replication.sender import Sender
from moevement_core.restart.generation import generation, waiting_for_others
from moevement_core.run.drain_requests import DrainRequest, DrainRequests
from moevement_core.run.events import FastAgain, SlowPlaceFound
from moevement_core.saving.reports import Reports
from moevement_core.speed.compare import BLOCK, BLOCKS, EVERY, RankSpeed, compare, compare_links
from moevement_core.speed.config import EVICT_SLOW, SpeedConfig
from moevement_core.speed.findings import Findings, SlowPlace, SlowRanks
from moevement_core.speed.phases import PhaseClock
from moevement_core.speed.waits import waits
from moevement_core.topology.topology import Topology
from moevement_core.trainer.interface import BindingInterface

SETTLING = 2
"""Number of iterations after a start or a failure that are not compared: a new process compiles code in them."""


class SpeedWatch:
    """Watch of one rank. The training thread calls all methods.

    Args:
        device: device of this rank.
        reports: reports of this rank.
        binding: binding of the trainer. The rank that writes the record also asks to drain slow places.
        config: flags.
    """

    def __init__(self, device: Device, reports: Reports, binding: BindingInterface, config: SpeedConfig) -> None:
        self._clock, self._reports, self._binding, self._config = PhaseClock(device), reports, binding, config
        self._seconds = deque[tuple[float, ...]](maxlen=EVERY)
        """Seconds of own work by phase, in the newest iterations since the last failure that were timed."""
        self._settling = SETTLING
        self._slow = SlowRanks(config.slow_factor)
        self._standing = list[SlowPlace]()
        """Places that are slow now, as all ranks know."""
        self._asked = dict[SlowPlace, tuple[str, DrainRequest]]()
        """Places that this rank has asked to drain, each with the target and the request."""
        self._evicted_at: float | None = None
        """Time of the job's last request to drain a slow place, in seconds since the epoch; None if it is not known."""
        self._slowest: tuple[int, float] | None = None
        """Rank with the largest factor in the last comparison, and the factor."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a metrics line about the last comparison."""
        rank, factor = self._slowest or (None, None)
        return {"slowest_rank": rank, "slowest_factor": factor}

    def begin_iteration(self, committed: int, topology: Topology, senders: Sequence[Sender]) -> None:
        """Begin to time an iteration; compare all ranks if this is due. Collective.

        Args:
            committed: newest committed iteration.
            topology: topology of this generation.
            senders: senders of this rank, one for each peer.
        """
        seconds = self._clock.begin()
        if seconds is not None and self._settling:
            self._settling -= 1
        elif seconds is not None:
            self._seconds.append(seconds)
        if committed and committed % EVERY == 0 and topology.world > 1:
            with waiting_for_others(), waits.waiting():
                self._compare(committed, topology, senders)

    def begin_update(self) -> None:
        """End the forward and backward pass of the iteration, and begin the update."""
        self._clock.begin_update()

    def end_update(self) -> None:
        """End the update, and the times of the iteration."""
        self._clock.end()

    def interrupted(self) -> None:
        """Drop the times, because an iteration was interrupted and ranks have moved."""
        self._clock.interrupted()
        self._seconds.clear()
        self._settling = SETTLING
        self._slow.forget()
        self._standing.clear()
        self._asked.clear()

    def _own_speed(self, senders: Sequence[Sender]) -> RankSpeed:
        links = tuple((sender.peer, sender.spread.link_bytes_per_s) for sender in senders)
        if len(self._seconds) < EVERY:
            return RankSpeed(os.getpid(), (), links)
        newest = list(self._seconds)
        blocks = [newest[first : first + BLOCK] for first in range(0, EVERY, BLOCK)]
        assert len(blocks) == BLOCKS
        return RankSpeed(os.getpid(), tuple(tuple(map(sum, zip(*block, strict=True))) for block in blocks), links)

    def _compare(self, committed: int, topology: Topology, senders: Sequence[Sender]) -> None:
        def decide(reports: Sequence[bytes]) -> bytes:
            speeds = [RankSpeed.decode(report) for report in reports]
            return self._slow.find(
                compare(speeds, topology.stages), compare_links(speeds, topology.nodes), topology.nodes,
                [speed.pid for speed in speeds],
            ).encode()  # fmt: skip

        findings = Findings.decode(topology.channels.job_group.decide(self._own_speed(senders).encode(), decide))
        self._slowest = findings.slowest
        for place in findings.over:
            self._is_fast_again(committed, place)
        self._standing = [place for place in self._standing if place not in findings.over]
        for place in self._standing:  # The least time between two evictions may be over now.
            if place not in self._asked and self._evict(place):
                self._reports.event(event := self._event(committed, place, f"; {EVICT_SLOW} drains it now"))
                self._reports.log(event.text)
        for place in findings.new:
            evicted = self._evict(place)
            event = self._event(committed, place, evicted)
            self._reports.warn(event.text, event)
        self._standing += findings.new

    def _event(self, committed: int, place: SlowPlace, evicted: str) -> SlowPlaceFound:
        devices = _devices(place.ranks)
        text = f"{_words(place, devices)} {'are' if len(place.ranks) > 1 else 'is'} slow: " + _loss(place)
        return SlowPlaceFound(
            text + evicted, iteration=committed, ranks=place.ranks, node=place.node, devices=devices, phase=place.phase,
            factor=round(place.factor, 3), is_evicted=place in self._asked,
        )  # fmt: skip

    def _is_fast_again(self, committed: int, place: SlowPlace) -> None:
        asked = self._asked.pop(place, None)
        if asked is not None and not place.is_node and (requests := self._requests) is not None:
            with suppress(OSError):
                requests.remove(*asked)
        text = f"{_words(place, _devices(place.ranks))} not slow any more ({place.phase})"
        self._reports.log_once(text)
        self._reports.event(FastAgain(text, iteration=committed, ranks=place.ranks, node=place.node))

    @property
    def _requests(self) -> DrainRequests | None:
        record = self._binding.record
        return None if record is None else DrainRequests(record.folder)

    def _last_eviction(self) -> float:
        record = self._binding.record
        events = record.events() if record is not None else ()
        times = (event["time"] for event in events if event["event"] == SlowPlaceFound.kind and event["is_evicted"])
        return max(times, default=-math.inf)

    def _evict(self, place: SlowPlace) -> str:
        """Ask to drain a place if the flags say so; return words about it for the log, empty if nobody is drained."""
        if not self._config.evict_slow or (requests := self._requests) is None:
            return ""
        now = time.time()
        if self._evicted_at is None:  # The rank that wrote the record before may have asked.
            self._evicted_at = self._last_eviction()
        if now - self._evicted_at < self._config.evict_seconds:
            return ""
        target = place.node if place.is_node else f"rank:{place.ranks[0]}"
        request = DrainRequest(f"slow: {_loss(place)}", None if place.is_node else place.pid)
        try:
            requests.add(target, request)
        except OSError as error:
            return f"; it cannot be drained: {error}"
        self._evicted_at, self._asked[place] = now, (target, request)
        return f"; {EVICT_SLOW} drains it"


def _words(place: SlowPlace, devices: Sequence[int]) -> str:
    ranks = ", ".join(map(str, place.ranks))
    named = f"rank {ranks}" if len(place.ranks) == 1 else f"ranks {ranks}"
    on = f" (device {', '.join(map(str, devices))})" if devices else ""
    return f"{named}{on} on node {place.node}"


def _loss(place: SlowPlace) -> str:
    return f"{place.phase} takes {place.factor:.2f} times as long as on its peers"


def _devices(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the local numbers of the devices of ``ranks``; empty on CPUs, and in a job without spares."""
    if (now := generation()) is None:
        return ()
    known = now.roster.devices
    return tuple(known[rank] for rank in ranks if rank in known)
