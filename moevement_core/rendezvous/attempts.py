"""Limits on repeated failures. The coordinator stops a job that fails again and again in the same iteration.

Until then, the coordinator forms the job again after each failure. From the third failure on, it first waits (the
backoff). A commit of an iteration that the job has never committed before is *progress*, and resets all counters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

FAILURES = 4
"""Number of failures in a row after which the coordinator stops the job. A failure counts only if a rank reported an
error and no rank died; the death of a rank or a newly committed iteration resets the count."""
DEATHS = 5
"""Number of deaths of the same rank in the same iteration after which the coordinator stops the job."""
BACK_OFF_S = 1.0
"""Seconds that the job waits before it starts again after a third failure without a newly committed iteration.

The wait doubles for each further failure.
"""
LONGEST_BACK_OFF_S = 30.0
"""Longest time in seconds that the job waits after a failure before it starts again."""


@dataclass
class AttemptCounts:
    """Counts of :class:`Attempts`, which another coordinator can continue."""

    committed: int = -1
    """Newest iteration that the job has committed; -1 for none."""
    here: int = -1
    """Newest iteration that the job has committed since it was last formed; -1 for none.

    It is lower than :attr:`committed` while ranks repeat iterations that were committed before a failure.
    """
    before: int = -1
    """Newest iteration that the job had committed when it was last formed; -1 for none."""
    failures: int = 0
    """Number of failures in a row in which a rank reported an error and no rank died."""
    first_error: str = ""
    """Error of the first of these failures, which may be the cause of the others; empty without failures."""
    deaths: dict[str, int] = field(default_factory=dict)
    """Number of deaths since the job last committed a new iteration; a key is ``RANK ITERATION``."""
    in_a_row: int = 0
    """Number of failures since the job last committed a new iteration; repeated iterations do not count as new."""
    generation: int = -1
    """Newest generation whose failure was counted."""
    replaced: set[int] = field(default_factory=set)
    """Ranks whose processes computed NaN or infinity and were replaced since a new iteration was last committed."""


class Attempts:
    """Counters of failures since the job last committed a new iteration; repeated iterations do not count as new."""

    def __init__(self) -> None:
        self.counts = AttemptCounts()

    @property
    def has_committed(self) -> bool:
        """True if the job has committed an iteration."""
        return self.counts.committed >= 0

    @property
    def has_progressed(self) -> bool:
        """True if the job has committed a new iteration since it was last formed."""
        return self.counts.committed > self.counts.before

    def committed(self, iteration: int) -> None:
        """Note that some rank has committed ``iteration``; a new iteration is progress and resets the counters."""
        self.counts.here = max(self.counts.here, iteration)
        if iteration > self.counts.committed:
            self.counts.committed = iteration
            self.counts.failures = self.counts.in_a_row = 0
            self.counts.deaths.clear()
            self.counts.replaced.clear()

    def formed(self) -> None:
        """Note that the job was formed again. Which iteration it executes is unknown until a rank reports a commit."""
        self.counts.here, self.counts.before = -1, self.counts.committed

    def failed(self, generation: int, dead_ranks: Collection[int], reasons: Sequence[str]) -> str | None:
        """Count the failure of a generation, and decide whether the coordinator may form the job again.

        The coordinator calls this again if more ranks of the same generation die before the next generation starts.
        Such a rank dies while it waits and not in an iteration, so its death does not count.

        Args:
            generation: the interrupted generation.
            dead_ranks: ranks that died since the last call.
            reasons: errors that survivors reported when they left the generation.

        Returns:
            The reason why the coordinator has to stop the job; None if it may form the job again.
        """
        is_new = generation != self.counts.generation
        self.counts.generation = generation
        self.counts.in_a_row += is_new
        iteration = (self.counts.here if self.counts.here >= 0 else self.counts.committed) + 1
        for rank in dead_ranks if is_new else ():
            key = f"{rank} {iteration}"
            self.counts.deaths[key] = self.counts.deaths.get(key, 0) + 1
            if self.counts.deaths[key] >= DEATHS:
                return (
                    f"rank {rank} died {DEATHS} times in a row in iteration {iteration}, which was never committed; if "
                    f"the batch of this iteration is the cause, leave it out with --iterations-to-skip {iteration}"
                )
        if dead_ranks:
            self.counts.failures = 0
        elif reasons and is_new:
            self.counts.failures += 1
            if self.counts.failures == 1:
                self.counts.first_error = reasons[0]
            if self.counts.failures >= FAILURES:
                first, last = self.counts.first_error, reasons[0]
                cause = f"the first error: {first}; " if first != last else ""
                return f"the job failed {FAILURES} times in a row at the same iteration; {cause}the last error: {last}"
        return None

    def suspected(self, ranks: Collection[int]) -> int | None:
        """Choose the rank whose process the coordinator replaces, after ranks have computed NaN or infinity.

        Only one process is replaced at a time, because the snapshots in the memory of a replaced process are lost.

        Args:
            ranks: ranks that computed NaN or infinity.

        Returns:
            The lowest of these ranks that was not replaced since the job last committed a new iteration. None if all
            were replaced; then the batch or the model is the cause.
        """
        rank = min(set(ranks) - self.counts.replaced, default=None)
        if rank is not None:
            self.counts.replaced.add(rank)
        return rank

    @property
    def back_off_s(self) -> float:
        """Seconds that the coordinator waits before it forms the job again.

        The value is 0 until the job has failed three times without a newly committed iteration.
        """
        if self.counts.in_a_row < 3:
            return 0.0
        return float(min(BACK_OFF_S * 2 ** (self.counts.in_a_row - 3), LONGEST_BACK_OFF_S))
