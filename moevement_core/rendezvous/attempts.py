"""When a job that fails again and again without coming further is given up, and how long it waits before it retries."""

from __future__ import annotations

from collections.abc import Collection, Sequence

FAILURES = 4
"""How often in a row ranks may fail by themselves, without a death, at the same iteration."""
DEATHS = 5
"""How often in a row the same rank may die at the same iteration."""
BACK_OFF_S = 1.0
"""The first wait, after the third failure without progress; doubled for each one after it."""
LONGEST_BACK_OFF_S = 30.0


class Attempts:
    """Counts failures since the job last committed an iteration that it had not committed before."""

    def __init__(self) -> None:
        self._committed = self._here = -1
        """The newest iteration of all; and of this attempt, which may have begun from an older window."""
        self._failures = 0
        self._deaths: dict[tuple[int, int], int] = {}
        """By rank and the iteration that it died in."""
        self._in_a_row = 0
        self._generation = -1
        self._replaced: set[int] = set()
        """Ranks that got another process because of a result that was not finite, since the last progress."""

    @property
    def has_committed(self) -> bool:
        """Whether any iteration of the job was committed."""
        return self._committed >= 0

    def committed(self, iteration: int) -> None:
        """Some rank is known to have committed it."""
        self._here = max(self._here, iteration)
        if iteration > self._committed:
            self._committed = iteration
            self._failures = self._in_a_row = 0
            self._deaths.clear()
            self._replaced.clear()

    def formed(self) -> None:
        """A new attempt begins; where it goes on from its ranks will tell."""
        self._here = -1

    def failed(self, generation: int, dead_ranks: Collection[int], reasons: Sequence[str]) -> str | None:
        """A generation was interrupted; called again when more of its ranks die before the next one has started.

        Those that die later, while they wait for the next attempt, do so in no iteration, and count for none.

        Args:
            generation: that was interrupted.
            dead_ranks: ranks that died since the last call.
            reasons: what ranks that live found wrong, in their words.

        Returns:
            Why the job must not be tried again; nothing if it may.
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
                    f"its batch is the cause, leave it out with --iterations-to-skip {iteration}"
                )
        if dead_ranks:
            self._failures = 0
        elif reasons and is_new:
            self._failures += 1
            if self._failures >= FAILURES:
                return f"it failed {FAILURES} times in a row in the same place: {reasons[0]}"
        return None

    def suspected(self, ranks: Collection[int]) -> int | None:
        """Return the rank whose process is to be replaced, of those that computed a result that is not finite.

        One at a time, the lowest first: each process that is replaced takes its part of the copies with it. None if all
        of them were replaced since the last progress: then the batch is to blame, or the model.
        """
        rank = min(set(ranks) - self._replaced, default=None)
        if rank is not None:
            self._replaced.add(rank)
        return rank

    @property
    def back_off_s(self) -> float:
        """How long to wait before the job is formed again."""
        if self._in_a_row < 3:
            return 0.0
        return float(min(BACK_OFF_S * 2 ** (self._in_a_row - 3), LONGEST_BACK_OFF_S))
