"""Estimate of the share of training time that saving costs, from quiet iterations and their neighbours.

The speed of a machine drifts, but a quiet iteration and its neighbours have about the same speed. So the estimate
compares each quiet iteration with its neighbours: ``median(saving neighbours) / quiet - 1``. The result is the cost of
digests and sends, which pause or have nothing to do in quiet iterations. If only few iterations save, the estimate
compares each saving iteration with the quiet iterations around it. The rest of the cost is time of the training thread.
A clock measures it in every iteration.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moevement_core.overhead.cap import RECENT, Evidence

REACH = 2
"""Number of iterations right before an iteration, and right after it, that count as its neighbours."""
REMEMBERED = 64
"""Most comparisons in an estimate; older ones are forgotten, because load and links change."""
ITERATIONS = 256
"""Number of newest iterations used for the share of saving iterations and for the cost on the training thread."""
CONFIDENCE = 0.95
MAD_TO_DEVIATION = 1.4826
"""Ratio of the standard deviation to the median absolute deviation, for a normal distribution."""
MEDIAN_TO_MEAN = 1.2533
"""Ratio of the standard error of a median to that of a mean, for a normal distribution."""
DISTURBED = 3.0
"""Multiple of the median time of an iteration and its neighbours. A quiet iteration or a neighbour that takes longer
counts as disturbed, for example by a dense save, an evaluation or a pause of the host."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one iteration on one rank."""

    iteration: int
    train_s: float
    """Seconds of the iteration, without ``copy_s``, ``policy_s`` and ``stall_s``."""
    copy_s: float
    """Seconds in which the training thread made the boundary record and issued copies of the snapshot."""
    policy_s: float
    """Seconds in which the training thread decided on order and window."""
    stall_s: float
    """Seconds that training waited for copies."""
    digest_cpu_s: float
    """Processor seconds of the background thread that computes digests."""
    send_cpu_s: float
    """Processor seconds of the threads that send and receive copies."""
    is_quiet: bool
    """True if no digest or send ran during the iteration, because background work paused or had nothing to do."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Cost of saving, and of each of its parts, as shares of the time of an iteration without saving."""

    share: float
    """Cost of all parts together, as a mean over all iterations, saving and quiet ones."""
    low: float | None
    """Lower end of the confidence interval of :attr:`share`; None until enough iterations have been compared."""
    high: float | None
    """Upper end of the confidence interval of :attr:`share`; None until enough iterations have been compared."""
    copy: float
    digest: float
    """Cost of digests. Only the cost of digests and sends together is measured; it is divided in proportion to their
    processor times."""
    send: float
    """Cost of sending copies, and of receiving copies of other ranks."""
    policy: float
    stall: float
    quiet_s: float
    """Median seconds of an iteration without saving."""
    quiet_iterations: int
    """Number of comparisons between quiet and saving iterations in the estimate."""


@dataclass
class OverheadEstimate:
    """Estimate of the cost of saving on one rank, from consecutive iterations."""

    _recent: deque[Timed] = field(default_factory=lambda: deque(maxlen=2 * REACH + 1))
    """Newest consecutive iterations, at most an iteration and its neighbours on both sides."""
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Results of the newest comparisons: time of a saving iteration over time of a quiet one, minus 1."""
    _quiet_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _all: deque[Timed] = field(default_factory=lambda: deque(maxlen=ITERATIONS))
    """Newest iterations, for the cost on the training thread."""

    def add(self, timed: Timed) -> None:
        """Add the next iteration. If iteration numbers have a gap, those on its two sides are no neighbours."""
        if self._recent and timed.iteration != self._recent[-1].iteration + 1:
            self._recent.clear()
        self._recent.append(timed)
        self._all.append(timed)
        if len(self._recent) == 2 * REACH + 1:
            self._compare(self._recent[REACH])

    def forget(self) -> None:
        """Forget the cost of saving, because the saved bytes or the links have changed.

        The times of quiet iterations stay, because they depend neither on saved bytes nor on links.
        """
        self._recent.clear()
        self._ratios.clear()
        self._all.clear()

    def _compare(self, middle: Timed) -> None:
        """Compare a quiet iteration with its saving neighbours, or a saving one with its quiet neighbours.

        Nothing is compared if there are too few such neighbours, or if ``middle`` is quiet and disturbed.
        """
        others = [near for near in self._recent if near.is_quiet != middle.is_quiet]
        usual_s = statistics.median(near.train_s for near in self._recent)
        undisturbed = [near.train_s for near in others if near.train_s <= DISTURBED * usual_s]
        # A saving iteration may take long because it saves, so it always counts. The median of all ratios tolerates a
        # few disturbed iterations.
        is_disturbed = middle.is_quiet and middle.train_s > DISTURBED * usual_s
        has_enough = len(others) > REACH or self._is_at_edge(middle)
        if not has_enough or not undisturbed or is_disturbed or middle.train_s <= 0:
            return
        other_s = statistics.median(undisturbed)
        quiet_s, saving_s = (middle.train_s, other_s) if middle.is_quiet else (other_s, middle.train_s)
        self._ratios.append(saving_s / quiet_s - 1)
        self._quiet_s.append(quiet_s)

    def _is_at_edge(self, middle: Timed) -> bool:
        """Return True if ``middle`` is a saving iteration, and all its neighbours on one side are quiet.

        Such neighbours are enough for a comparison, although they are fewer than otherwise required.
        """
        recent = list(self._recent)
        sides = recent[:REACH], recent[-REACH:]
        return not middle.is_quiet and any(all(near.is_quiet for near in side) for side in sides)

    @property
    def quiet_s(self) -> float | None:
        """Median seconds of an iteration without saving; None before the first comparison."""
        return statistics.median(list(self._quiet_s)[-RECENT:]) if self._quiet_s else None

    @property
    def _saving_share(self) -> float:
        """Share of the newest iterations in which a digest or send ran."""
        return statistics.fmean(not comparison.is_quiet for comparison in self._all)

    def _on_training_thread(self) -> list[float]:
        """Return the cost on the training thread as three shares: copies, policy and stalls."""
        quiet_s = statistics.median(self._quiet_s)
        timed = zip(
            *((comparison.copy_s, comparison.policy_s, comparison.stall_s) for comparison in self._all), strict=True
        )
        return [statistics.fmean(values) / quiet_s for values in timed]

    def evidence(self) -> Evidence:
        """Return the cost from the newest comparisons only, for decisions about the saved bytes."""
        newest = list(self._ratios)[-RECENT:]
        if len(newest) < 2:
            return Evidence(0.0, 0.0, len(newest))
        middle = statistics.median(newest)
        deviation = MAD_TO_DEVIATION * statistics.median(abs(ratio - middle) for ratio in newest)
        error = MEDIAN_TO_MEAN * deviation / math.sqrt(len(newest))
        share = self._saving_share
        return Evidence(sum(self._on_training_thread()) + share * middle, share * error, len(newest))

    def measured(self) -> Overhead | None:
        """Return the cost of saving; None before the first comparison."""
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
            share=on_training_thread + background, low=None if low is None else on_training_thread + saving_share * low,
            high=None if high is None else on_training_thread + saving_share * high, copy=copy, digest=digest,
            send=background - digest, policy=policy, stall=stall, quiet_s=statistics.median(self._quiet_s),
            quiet_iterations=len(self._ratios),
        )  # fmt: skip


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float | None, float | None]:
    """Return a confidence interval of the median, valid for any distribution; ``(None, None)`` for too few values.

    The ends are two of the values. The median of the distribution lies between the ``k``-th smallest and the ``k``-th
    largest of ``n`` values with probability ``1 - 2 P(B < k)``. Here ``B`` is binomial with ``n`` draws of probability
    one half. See David and Nagaraja, Order Statistics, section 7.1.
    """
    ordered, count = sorted(values), len(values)
    outside, ends = 0.0, 0
    while ends < count // 2:
        outside += 2 * math.comb(count, ends) / 2**count
        if outside > 1 - confidence:
            break
        ends += 1
    return (ordered[ends - 1], ordered[count - ends]) if ends else (None, None)
