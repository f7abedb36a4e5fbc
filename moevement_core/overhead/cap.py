"""Rule by which the measured cost of saving changes the number of bytes that an iteration saves.

The cost of copies, digests and sends grows with these bytes. :func:`factor` cuts the bytes as soon as the cost is
clearly above the cap (multiplicative decrease), and raises them step by step while the cost is below half of the cap.

If ranks fail often, a low cost of saving is a bad bargain, because each failure repeats many iterations.
:func:`worthwhile` says which cost is then the best. The cap does not apply below it, unless the user gave the cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RECENT = 16
"""Number of newest comparisons on which a decision about the bytes rests. Links may have changed since earlier
comparisons."""
FEWEST = 4
"""Fewest comparisons with quiet iterations (without digests and sends) for a usable measurement."""
FEWEST_CLEAR, CLEAR, SURE = 2, 3.0, 2.0
"""Thresholds of an early decrease. If the cost minus ``SURE`` standard errors exceeds ``CLEAR`` times the cap, the
bytes decrease after only ``FEWEST_CLEAR`` comparisons instead of ``FEWEST``."""
FEWEST_TO_GROW = 8
"""Fewest comparisons with quiet iterations (without digests and sends) before the saved bytes may grow."""
AIM = 0.7
"""Cost that a change of the bytes aims for, as a share of the cap; below 1, so that the next measurement stays below
the cap."""
LEAST_STEP, MOST_STEP = 1 / 16, 2.0
"""Smallest and largest factor by which the bytes change at a time."""
MOST_STEP_FOR_FAILURES = 4.0
"""Largest factor by which the bytes grow at a time because ranks fail often. It is larger than ``MOST_STEP``, because
the next failure may come before another decision."""
OVERHEAD_CAP = 0.02
"""Default cap: share of training time that saving may cost."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measured cost of saving since the saved bytes last changed."""

    share: float
    """Share of training time that saving costs."""
    error: float
    """Standard error of :attr:`share`."""
    comparisons: float
    """Number of comparisons between iterations with and without saving; fractional if it is a mean over ranks."""


def worthwhile(evidence: Evidence, period: float, failures_every: float) -> float:
    """Return the share of training time that saving should cost at the present rate of failures.

    A window costs ``c = share * period`` iterations. If windows begin every ``p`` iterations and a failure comes every
    ``m`` iterations, saving costs the share ``c / p``. A failure repeats ``p / 2`` iterations on average, so failures
    cost the share ``p / (2 m)``. The sum is least for ``p = sqrt(2 c m)`` (Young, 1974), where each of the two costs is
    ``sqrt(c / (2 m))``.

    Args:
        evidence: measured cost with the present windows.
        period: iterations from one window to the next at present; 0.0 if the period has no effect on what a failure
            repeats, as with redo in windows that follow each other.
        failures_every: mean iterations between failures; infinite without a failure.

    Returns:
        The share; 0.0 without failures, or if the measured cost is not above zero.
    """
    return math.sqrt(max(0.0, evidence.share) * period / (2 * failures_every))


def factor(evidence: Evidence | None, cap: float, worth: float = 0.0) -> float:
    """Return the factor by which to change the bytes that an iteration saves; 1.0 for no change.

    Args:
        evidence: measured cost; None if nothing is measured yet.
        cap: share of training time that saving may cost.
        worth: result of :func:`worthwhile`. If it is above ``cap``, it takes the place of ``cap``.
    """
    if evidence is None:
        return 1.0
    is_known, is_failing, cap = evidence.comparisons >= FEWEST, worth > cap, max(cap, worth)
    is_clear = evidence.comparisons >= FEWEST_CLEAR and evidence.share - SURE * evidence.error > CLEAR * cap
    if is_clear or (is_known and evidence.share - evidence.error > cap):
        # The cost may be as high as this by chance. Too few bytes are corrected later; too many break the cap.
        return max(LEAST_STEP, AIM * cap / (evidence.share + evidence.error))
    if is_failing and evidence.share < cap / 2 and evidence.comparisons >= FEWEST_CLEAR:
        return min(MOST_STEP_FOR_FAILURES, cap / evidence.share)
    if evidence.share < cap / 2 and evidence.comparisons >= FEWEST_TO_GROW:
        return min(MOST_STEP, AIM * cap / max(evidence.share, AIM * cap / MOST_STEP))
    return 1.0


def safe_factor(evidence: Evidence | None, cap: float) -> float:
    """Return a factor for the bytes that an iteration saves with which the cost stays below the cap, at most 1.0.

    It is for windows of another form, whose cost may differ from the measured one although they save as many bytes.

    Args:
        evidence: measured cost of the present windows; None if nothing is measured yet.
        cap: share of training time that saving may cost.
    """
    if evidence is None or (most := evidence.share + evidence.error) <= 0:
        return 1.0
    return min(1.0, max(LEAST_STEP, AIM * cap / most))


class CapWatch:
    """Watch that notices when the measured cost rises above the cap, so that the job can warn the user.

    The cost can stay above the cap if flags fix the window, or if the period of windows is already the longest one.

    Args:
        cap: share of training time that saving may cost.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._is_above = False

    def has_passed(self, evidence: Evidence, worth: float = 0.0) -> bool:
        """Return True if the cost is clearly above the cap now, and was not at the previous call.

        So the job warns once each time that the cost rises above the cap. The method ignores evidence from fewer than
        :data:`RECENT` comparisons.

        Args:
            evidence: measured cost.
            worth: share that saving should cost because ranks fail; above the cap, it takes the place of the cap.
        """
        if evidence.comparisons < RECENT:  # The saved bytes have changed lately, or there are few measurements.
            return False
        was_above, self._is_above = self._is_above, evidence.share - evidence.error > max(self.cap, worth)
        return self._is_above and not was_above
