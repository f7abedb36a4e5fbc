"""A training with failures, from one to the next: hours of it in milliseconds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moevement_core.simulator.failures import Failure
from moevement_core.simulator.strategies import Strategy


@dataclass(frozen=True)
class Spares:
    """Nodes that wait to take the place of others."""

    count: int | None = None
    """None: there is always one."""
    repair_s: float = math.inf
    """After which a node that failed is a spare again."""
    provided_s: float = math.inf
    """After which a scheduler gives another node where none is left."""


@dataclass
class Outcome:
    """What came of a training."""

    wall_s: float
    iterations: int
    iteration_s: float
    """Without checkpointing and failures."""
    failures: int = 0
    during_recovery: int = 0
    """Failures that came while the job was still coming back from another."""
    from_storage: int = 0
    """Failures after which no copy in memory was left."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """Wall seconds that went elsewhere, by what."""
    tokens_lost: float = 0.0
    goodput: list[tuple[float, int]] = field(default_factory=list)
    """Iterations committed, by wall seconds: at each failure, and at the end."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: time that iterations would take by themselves, over the time they took."""
        return self.iterations * self.iteration_s / self.wall_s


def train(strategy: Strategy, failures: Sequence[Failure], until_s: float, spares: Spares | None = None) -> Outcome:
    """Run until ``until_s``.

    A failure interrupts an iteration, whose time is lost, or a recovery, which starts over for all that has been lost
    since state was whole.

    Args:
        strategy: a fresh one; it may change on the way.
        failures: in order.
        until_s: wall seconds.
        spares: unlimited if left out.
    """
    iteration_s = strategy.costs.iteration_s
    made = Outcome(until_s, 0, iteration_s)
    made.lost_s = dict.fromkeys(
        ("checkpointing", "interrupted", "detect", "no spare", "regroup", "fetch", "convert", "catch up"), 0.0
    )
    pool = _Pool(spares or Spares())
    recovering, failed_at, lost, into = dict[str, float](), 0.0, set[int](), 0.0
    for failure in (*(one for one in failures if one.at_s < until_s), Failure(until_s, ())):
        ready = failed_at + sum(recovering.values())
        _spend(made.lost_s, recovering, failure.at_s - failed_at)
        if failure.at_s >= ready:
            into = _advance(made, strategy.overhead_s, failure.at_s - ready)
            lost.clear()
        else:
            made.during_recovery += bool(failure.nodes)
        made.goodput.append((failure.at_s, made.iterations))
        if failure.nodes:
            made.failures += 1
            lost |= set(failure.nodes)
            recovery = strategy.recover(made.iterations, lost, into)
            made.from_storage += recovery.from_storage
            made.tokens_lost += recovery.tokens_lost
            failed_at = failure.at_s
            recovering = {
                "detect": recovery.detect_s, "no spare": pool.take(failed_at, len(failure.nodes)),
                "regroup": recovery.regroup_s, "fetch": recovery.fetch_s, "convert": recovery.convert_s,
                "catch up": recovery.catch_up_s,
            }  # fmt: skip
    return made


def _advance(made: Outcome, overhead_s: float, seconds: float) -> float:
    """Train for so long; returns the share of the next iteration that is over."""
    each = made.iteration_s + overhead_s
    # A whole number of iterations has to count as whole, whatever rounding has made of it.
    count = math.floor(seconds / each + 1e-9)
    made.iterations += count
    made.lost_s["checkpointing"] += count * overhead_s
    interrupted_s = max(0.0, seconds - count * each)
    made.lost_s["interrupted"] += interrupted_s
    return interrupted_s / each


def _spend(lost: dict[str, float], parts: Mapping[str, float], seconds: float) -> None:
    """A recovery goes on for ``seconds``, or to its end."""
    for name, length in parts.items():
        spent = min(length, seconds)
        lost[name] += spent
        seconds -= spent


class _Pool:
    def __init__(self, spares: Spares) -> None:
        self._spares, self._free = spares, spares.count
        self._repaired: list[float] = []

    def take(self, now: float, count: int) -> float:
        """Give out spares for ``count`` nodes; returns how long that takes."""
        if self._free is None:
            return 0.0
        for _ in range(count):
            heapq.heappush(self._repaired, now + self._spares.repair_s)
        ready = now
        for _ in range(count):
            while self._repaired and self._repaired[0] <= now:
                heapq.heappop(self._repaired)
                self._free += 1
            if self._free:
                self._free -= 1
            elif self._repaired[0] > now + self._spares.provided_s:
                ready = max(ready, now + self._spares.provided_s)
                # The scheduler has the node that failed in its place: the job does not gain a spare by it.
                self._repaired.remove(max(self._repaired))
                heapq.heapify(self._repaired)
            else:
                ready = max(ready, heapq.heappop(self._repaired))
        return ready - now
