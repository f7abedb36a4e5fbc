"""Limits on repeated failures: when the coordinator gives up a job without progress, and the backoff before a retry."""

from __future__ import annotations

from collections.abc import Collection, Sequence

FAILURES = 4
"""Number of failures in a row, without a death and at the same iteration, that end the job."""
DEATHS = 5
"""Number of deaths of one rank at the same iteration that end the job."""
BACK_OFF_S = 1.0
"""Seconds of backoff after the third failure without progress; the backoff doubles for each further failure."""
LONGEST_BACK_OFF_S = 30.0
"""Longest backoff, in seconds."""


class Attempts:
    """Counters of failures since the last progress: the last commit of an iteration never committed before."""

    def __init__(self) -> None:
        self._committed = self._here = -1
        """Newest iteration that the job has committed, and newest that the present attempt has committed; -1 for none.

        They differ if the attempt resumed from an older window.
        """
        self._failures = 0
        self._deaths: dict[tuple[int, int], int] = {}
        """Number of deaths since the last progress, by rank and by the iteration in which the rank died."""
        self._in_a_row = 0
        """Number of failures in a row without progress."""
        self._generation = -1
        """Newest generation whose failure was counted."""
        self._replaced: set[int] = set()
        """Ranks whose process was replaced since the last progress because it computed a result that is not finite."""

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
        """Begin a new attempt, whose resume iteration is unknown until its ranks report a commit."""
        self._here = -1

    def failed(self, generation: int, dead_ranks: Collection[int], reasons: Sequence[str]) -> str | None:
        """Count the failure of a generation, and decide if the job may be tried again.

        The coordinator calls this again if more ranks of the same generation die before the next generation starts.
        Such a rank dies while it waits and not in an iteration, so its death does not count.

        Args:
            generation: the interrupted generation.
            dead_ranks: ranks that died since the last call.
            reasons: errors that survivors reported when they left the generation.

        Returns:
            The reason why the job must not be tried again; None if it may.
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
        """Choose the rank whose process is replaced because it may have computed a result that is not finite.

        Only one process is replaced at a time, because the snapshots in the memory of a replaced process are lost.

        Args:
            ranks: ranks that computed results that are not finite.

        Returns:
            The lowest of these ranks that was not replaced since the last progress. None if all were replaced; then the
            batch or the model is the cause.
        """
        rank = min(set(ranks) - self._replaced, default=None)
        if rank is not None:
            self._replaced.add(rank)
        return rank

    @property
    def back_off_s(self) -> float:
        """Seconds of backoff before the job is formed again; 0 up to the second failure without progress."""
        if self._in_a_row < 3:
            return 0.0
        return float(min(BACK_OFF_S * 2 ** (self._in_a_row - 3), LONGEST_BACK_OFF_S))
