"""The share of training time that saving costs, estimated from quiet iterations and their neighbours.

A machine whose speed drifts slows a quiet iteration as much as those beside it, so each quiet iteration is compared
with its own neighbours: ``median(saving neighbours) / quiet - 1``. That is the cost of digests and sends, which pause
in quiet iterations or have nothing to do there. Where few iterations save, each of them is compared with the quiet ones
around it instead. What goes on in every iteration, on the training thread, is timed directly.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moevement_core.overhead.cap import RECENT, Evidence

REACH = 2
"""Neighbours on each side of a quiet iteration that it is compared with."""
REMEMBERED = 64
"""Comparisons that an estimate is made from, at most; older ones are forgotten, for load and links change."""
ITERATIONS = 256
"""Iterations from which the share is taken of those that save, and what the training thread does itself."""
CONFIDENCE = 0.95
MAD_TO_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
MEDIAN_TO_MEAN = 1.2533
"""Standard error of a median over that of a mean, of a normal distribution."""
DISTURBED = 3.0
"""A quiet iteration, or a neighbour, that takes this many times as long as the median of its neighbourhood had
something else beside it: a dense save, an evaluation, a pause of the host."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An iteration as one rank has timed it."""

    iteration: int
    train_s: float
    """Seconds of the iteration, without the three that follow."""
    copy_s: float
    """Seconds of the training thread for the snapshot: boundary record and issuing copies."""
    policy_s: float
    """Seconds of the training thread for deciding order and window."""
    stall_s: float
    """Seconds that training waited for copies."""
    digest_cpu_s: float
    """Processor seconds of the background thread that makes digests."""
    send_cpu_s: float
    """Processor seconds of the threads that send and receive copies."""
    is_quiet: bool
    """True if nothing was digested or sent beside it: background work paused, or there was none."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """The cost of saving, as shares of the time that an iteration takes without it."""

    share: float
    """Share of training time for all parts together, as a mean over saving and quiet iterations."""
    low: float | None
    """Lower end of the confidence interval of :attr:`share`; None while there are too few quiet iterations for one."""
    high: float | None
    """Upper end of the same interval."""
    copy: float
    digest: float
    """Digests' part of what pauses in quiet iterations, in proportion to processor time."""
    send: float
    """The rest of what pauses in quiet iterations: sending copies to peers, and receiving theirs."""
    policy: float
    stall: float
    quiet_s: float
    """Seconds that an iteration takes without saving, median."""
    quiet_iterations: int
    """Quiet iterations that the estimate was made from."""


@dataclass
class OverheadEstimate:
    """The estimate of one rank, from the iterations that it is given one after the other."""

    _recent: deque[Timed] = field(default_factory=lambda: deque(maxlen=2 * REACH + 1))
    """The newest iterations, without a gap."""
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Saving neighbours over quiet iteration, less 1."""
    _quiet_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _all: deque[Timed] = field(default_factory=lambda: deque(maxlen=ITERATIONS))
    """The newest iterations, for what is timed directly."""

    def add(self, timed: Timed) -> None:
        """Take in the next iteration; one that does not follow the last begins a new neighbourhood."""
        if self._recent and timed.iteration != self._recent[-1].iteration + 1:
            self._recent.clear()
        self._recent.append(timed)
        self._all.append(timed)
        if len(self._recent) == 2 * REACH + 1:
            self._compare(self._recent[REACH])

    def forget(self) -> None:
        """Forget what saving cost: what is saved, or over which links, has changed. Training itself has not."""
        self._recent.clear()
        self._ratios.clear()
        self._all.clear()

    def _compare(self, middle: Timed) -> None:
        """Compare an iteration with those around it that are of the other kind, if enough of them are."""
        others = [near for near in self._recent if near.is_quiet != middle.is_quiet]
        usual_s = statistics.median(near.train_s for near in self._recent)
        undisturbed = [near.train_s for near in others if near.train_s <= DISTURBED * usual_s]
        # A saving iteration may well take as long because it saves: it counts, and medians bear with a few that do not.
        is_disturbed = middle.is_quiet and middle.train_s > DISTURBED * usual_s
        has_enough = len(others) > REACH or self._is_at_edge(middle)
        if not has_enough or not undisturbed or is_disturbed or middle.train_s <= 0:
            return
        other_s = statistics.median(undisturbed)
        quiet_s, saving_s = (middle.train_s, other_s) if middle.is_quiet else (other_s, middle.train_s)
        self._ratios.append(saving_s / quiet_s - 1)
        self._quiet_s.append(quiet_s)

    def _is_at_edge(self, middle: Timed) -> bool:
        """Return whether it is the first or the last of some that save one after the other, between quiet ones."""
        recent = list(self._recent)
        sides = recent[:REACH], recent[-REACH:]
        return not middle.is_quiet and any(all(near.is_quiet for near in side) for side in sides)

    @property
    def quiet_s(self) -> float | None:
        """Seconds that an iteration takes without saving, median; None before the first quiet one."""
        return statistics.median(list(self._quiet_s)[-RECENT:]) if self._quiet_s else None

    @property
    def _saving_share(self) -> float:
        """Share of the newest iterations beside which something was digested or sent."""
        return statistics.fmean(not comparison.is_quiet for comparison in self._all)

    def _on_training_thread(self) -> list[float]:
        """Return the training thread's part of the cost: copies, policy, stalls, as shares."""
        quiet_s = statistics.median(self._quiet_s)
        timed = zip(
            *((comparison.copy_s, comparison.policy_s, comparison.stall_s) for comparison in self._all), strict=True
        )
        return [statistics.fmean(values) / quiet_s for values in timed]

    def evidence(self) -> Evidence:
        """Return the newest of what is known of the cost, for who decides what is saved next."""
        newest = list(self._ratios)[-RECENT:]
        if len(newest) < 2:
            return Evidence(0.0, 0.0, len(newest))
        middle = statistics.median(newest)
        deviation = MAD_TO_DEVIATION * statistics.median(abs(ratio - middle) for ratio in newest)
        error = MEDIAN_TO_MEAN * deviation / math.sqrt(len(newest))
        share = self._saving_share
        return Evidence(sum(self._on_training_thread()) + share * middle, share * error, len(newest))

    def measured(self) -> Overhead | None:
        """Return what saving costs; None before a quiet iteration could be compared."""
        if not self._ratios:
            return None
        saving_share = self._saving_share
        low, high = median_interval(self._ratios)
        background = saving_share * statistics.median(self._ratios)
        copy, policy, stall = self._on_training_thread()
        on_training_thread = copy + policy + stall
        digest_s, send_s = (
            sum(comparison.digest_cpu_s for comparison in self._all),
            sum(comparison.send_cpu_s for comparison in self._all),
        )
        digest = background * digest_s / (digest_s + send_s) if digest_s + send_s else 0.0
        return Overhead(
            on_training_thread + background,
            None if low is None else on_training_thread + saving_share * low,
            None if high is None else on_training_thread + saving_share * high,
            copy, digest, background - digest, policy, stall, statistics.median(self._quiet_s), len(self._ratios),
        )  # fmt: skip


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float | None, float | None]:
    """Return the ends of a confidence interval of the median, whatever the distribution; None, None of too few values.

    The ends are order statistics: of ``n`` values the median lies between the ``k``-th smallest and the ``k``-th
    largest with probability ``1 - 2 P(B < k)``, where ``B`` is binomial with ``n`` draws of one half. See David and
    Nagaraja, Order Statistics, section 7.1.
    """
    ordered, count = sorted(values), len(values)
    outside, ends = 0.0, 0
    while ends < count // 2:
        outside += 2 * math.comb(count, ends) / 2**count
        if outside > 1 - confidence:
            break
        ends += 1
    return (ordered[ends - 1], ordered[count - ends]) if ends else (None, None)
