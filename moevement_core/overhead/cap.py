"""Bytes that an iteration may save, from the measured cost of what is saved now.

The cost of copies, digests and sends grows with the bytes that an iteration saves. So bytes follow the measured share:
fewer as soon as it is surely above the cap (multiplicative decrease), more, step by step, while it is below half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

RECENT = 16
"""Comparisons that decide on what is saved next, at most: older ones may be of other links."""
FEWEST = 4
"""Comparisons with quiet iterations before a measurement says anything."""
FEWEST_CLEAR, CLEAR, SURE = 2, 3.0, 2.0
"""Comparisons that are enough where the share, less so many standard errors, is so many times the cap: training is
then worth more than certainty."""
FEWEST_TO_GROW = 8
"""Comparisons before more bytes are saved than now."""
AIM = 0.7
"""Share of the cap that fewer bytes aim at, so that the next measurement is not above it again."""
LEAST_STEP, MOST_STEP = 1 / 16, 2.0
"""Factors by which bytes change at a time, at most."""
OVERHEAD_CAP = 0.02
"""Share of training time that saving may cost, by default."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measured cost of what is saved now, of all ranks together."""

    share: float
    """Share of training time."""
    error: float
    """Standard error of :attr:`share`."""
    comparisons: float
    """Quiet iterations that were compared with their neighbours, a mean over ranks."""


def factor(evidence: Evidence | None, cap: float) -> float:
    """Return the factor by which the bytes that an iteration saves should change; 1.0: they should not.

    Args:
        evidence: the measured cost; None before anything is measured.
        cap: share of training time that saving may cost.
    """
    if evidence is None:
        return 1.0
    is_known = evidence.comparisons >= FEWEST
    is_clear = evidence.comparisons >= FEWEST_CLEAR and evidence.share - SURE * evidence.error > CLEAR * cap
    if is_clear or (is_known and evidence.share - evidence.error > cap):
        return max(LEAST_STEP, AIM * cap / evidence.share)
    if evidence.share < cap / 2 and evidence.comparisons >= FEWEST_TO_GROW:
        return min(MOST_STEP, AIM * cap / max(evidence.share, AIM * cap / MOST_STEP))
    return 1.0


class CapWatch:
    """Watch of a cost that stays above the cap: where a window is given, or nothing rarer can be saved.

    Args:
        cap: share of training time that saving may cost.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._is_above = False

    def has_passed(self, evidence: Evidence) -> bool:
        """Return whether the cost of what has been saved for long is surely above the cap, and was not before."""
        if evidence.comparisons < RECENT:  # what is saved has just changed, or little is known
            return False
        was_above, self._is_above = self._is_above, evidence.share - evidence.error > self.cap
        return self._is_above and not was_above
