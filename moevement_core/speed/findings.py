"""Ranks that count as slow: each is named once, until it is as fast as its peers again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from moevement_core.speed.compare import SENDING, Slowness, slowest


@dataclass(frozen=True)
class SlowPlace:
    """Node or rank that is slower than its peers."""

    ranks: tuple[int, ...]
    """Slow ranks: all of the node, or one."""
    node: str
    is_node: bool
    """True if all ranks of the node that could be compared are slow, and there are several."""
    phase: str
    """Phase in which the place loses most."""
    factor: float
    """Time of the slowest of the ranks divided by that of its peers."""
    pid: int
    """Process id of the first of the ranks."""


@dataclass(frozen=True)
class Findings:
    """Result of a comparison, which one rank computes and all ranks get."""

    new: tuple[SlowPlace, ...] = ()
    """Places that are slow now and were not before."""
    over: tuple[SlowPlace, ...] = ()
    """Places that were slow and are not any more."""
    slowest: tuple[int, float] | None = None
    """Rank with the largest factor, and the factor; None without a comparison."""

    def encode(self) -> bytes:
        """Return the findings as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Findings:
        """Return the findings that :meth:`encode` has encoded."""
        fields = json.loads(data)
        new, over = (
            tuple(SlowPlace(**{**place, "ranks": tuple(place["ranks"])}) for place in fields[name])
            for name in ("new", "over")
        )
        slowest = fields["slowest"]
        return Findings(new, over, None if slowest is None else (slowest[0], slowest[1]))


@dataclass
class SlowRanks:
    """Ranks that count as slow, on the rank that compares.

    Args:
        threshold: factor from which a rank counts as slow. A rank that has been named is fast again below the middle
            of 1 and this factor.
    """

    threshold: float
    _places: list[SlowPlace] = field(default_factory=list)
    """Places that are slow now."""
    _links_before: frozenset[int] = frozenset()
    """Ranks whose links were slow in the last comparison. Rates of links vary, so it takes two comparisons."""

    def find(
        self,
        compared: Mapping[int, Slowness],
        links: Mapping[int, Slowness],
        nodes: Sequence[str],
        pids: Sequence[int],
    ) -> Findings:
        """Return what has changed since the last call.

        Args:
            compared: own work of each rank, compared with that of its peers.
            links: ranks on nodes whose links are slow.
            nodes: node of each rank.
            pids: process id of each rank.
        """
        slow = {rank: each for rank, each in compared.items() if each.least >= self.threshold}
        slow |= {rank: each for rank, each in links.items() if rank in self._links_before and rank not in slow}
        known = {rank for place in self._places for rank in place.ranks}
        new = _places({rank: slow[rank] for rank in slow.keys() - known}, compared, nodes, pids)
        over = [place for place in self._places if not any(self._is_slow(rank, place, compared, links)
                                                           for rank in place.ranks)]  # fmt: skip
        self._links_before = frozenset(links)
        self._places = [place for place in self._places if place not in over] + new
        return Findings(tuple(new), tuple(over), slowest(compared))

    def forget(self) -> None:
        """Forget all places after a failure, because ranks have moved; places that are still slow are named again."""
        self._places, self._links_before = [], frozenset()

    def _is_slow(
        self, rank: int, place: SlowPlace, compared: Mapping[int, Slowness], links: Mapping[int, Slowness]
    ) -> bool:
        if place.phase == SENDING:
            return rank in links
        return rank not in compared or compared[rank].factor >= (1 + self.threshold) / 2


def _places(
    slow: Mapping[int, Slowness], compared: Mapping[int, Slowness], nodes: Sequence[str], pids: Sequence[int]
) -> list[SlowPlace]:
    """Return the places of slow ranks: a node if all its ranks are slow, otherwise each rank alone."""
    on = defaultdict[str, list[int]](list)
    for rank in sorted(slow):
        on[nodes[rank]].append(rank)
    places = []
    for node, ranks in on.items():
        others = {rank for rank in compared if nodes[rank] == node} - set(ranks)
        groups = [ranks] if len(ranks) > 1 and not others else [[rank] for rank in ranks]
        for group in groups:
            worst = max((slow[rank] for rank in group), key=lambda each: each.factor)
            is_node = len(group) > 1 or worst.phase == SENDING
            places.append(
                SlowPlace(tuple(group), node, is_node, phase=worst.phase, factor=worst.factor, pid=pids[group[0]])
            )
    return places
