"""Limits on repeated failures. The coordinator stops a job that fails again and again in the same iteration.

Until then, the coordinator forms the job again after each failure. From the third failure on, it first waits (the
backoff). A commit of an iteration that the job has never committed before is *progress*, and resets all counters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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


class Attempts:
    """Counters of failures since the job last committed a new iteration; repeated iterations do not count as new."""

    def __init__(self) -> None:
        self._committed = self._here = -1
        """Newest iteration that the job has committed: ever (``_committed``), and since it was last formed (``_here``).

        A value of -1 means none. ``_here`` is lower while ranks repeat iterations that were committed before a failure.
        """
        self._failures = 0
        self._deaths: dict[tuple[int, int], int] = {}
        """Number of deaths since the job last committed a new iteration, by rank and by the iteration of the death."""
        self._in_a_row = 0
        """Number of failures since the job last committed a new iteration; repeated iterations do not count as new."""
        self._generation = -1
        """Newest generation whose failure was counted."""
        self._replaced: set[int] = set()
        """Ranks whose processes computed NaN or infinity and were replaced since a new iteration was last committed."""

    @property
    def has_committed(self) -> bool:
        """True if the job has committed an iteration."""
        return self._committed >= 0

    def committed(self, iteration: int) -> None:
        """Note that some rank has committed ``iteration``; a new iteration is progress and resets the counters."""
        self._here = max(self._here, iteration)
        if iteration > self._committed:
            self._committed = iteration
            self._failures = self._in_a_row = 0
            self._deaths.clear()
            self._replaced.clear()

    def formed(self) -> None:
        """Note that the job was formed again. Which iteration it executes is unknown until a rank reports a commit."""
        self._here = -1

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
        is_new = generation != self._generation
        self._generation = generation
        self._in_a_row += is_new
        iteration = (self._here if self._here >= 0 else self._committed) + 1
        for rank in dead_ranks if is_new else ():
            self._deaths[rank, iteration] = self._deaths.get((rank, iteration), 0) + 1
            if self._deaths[rank, iteration] >= DEATHS:
                return (
                    f"rank {rank} died {DEATHS} times in a row in iteration {iteration}, which was never committed; if "
                    f"the batch of this iteration is the cause, leave it out with --iterations-to-skip {iteration}"
                )
        if dead_ranks:
            self._failures = 0
        elif reasons and is_new:
            self._failures += 1
            if self._failures >= FAILURES:
                return f"the job failed {FAILURES} times in a row at the same iteration; the last error: {reasons[0]}"
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
        rank = min(set(ranks) - self._replaced, default=None)
        if rank is not None:
            self._replaced.add(rank)
        return rank

    @property
    def back_off_s(self) -> float:
        """Seconds that the coordinator waits before it forms the job again.

        The value is 0 until the job has failed three times without a newly committed iteration.
        """
        if self._in_a_row < 3:
            return 0.0
        return float(min(BACK_OFF_S * 2 ** (self._in_a_row - 3), LONGEST_BACK_OFF_S))
