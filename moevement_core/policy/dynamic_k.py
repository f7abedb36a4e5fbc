"""Growth of the number of saved experts as tokens are lost (MoC-System, section 5.3, "Dynamic-K")."""

from __future__ import annotations

import math
from dataclasses import dataclass

PLT_LIMIT = 0.0375
"""Share of lost tokens up to which the paper found no harm (section 3.1.2)."""
FIRST_SHARE = 8
"""Divisor of E that gives the first number of saved experts, unless that number is configured."""


@dataclass(frozen=True)
class DynamicK:
    """Policy that doubles K while the share of lost tokens exceeds its limit, until K is E."""

    first: int
    """First value of K."""
    most: int
    """E, the number of experts, which K never exceeds."""
    limit: float
    """Share of all tokens that may be lost before K is E; 1 keeps K constant."""

    @staticmethod
    def of(experts: int | None, most: int, limit: float) -> DynamicK:
        """Return a policy whose first K is ``experts``; None: an eighth of ``most``."""
        return DynamicK(min(experts or math.ceil(most / FIRST_SHARE), most), most, limit)

    def after(self, experts: int, proportion: float) -> int:
        """Return K from now on.

        Args:
            experts: K until now.
            proportion: share of all tokens that recoveries have lost.
        """
        while self.limit < 1 and experts < self.most and proportion > self._share_of_limit(experts):
            experts = min(2 * experts, self.most)
        return experts

    def _share_of_limit(self, experts: int) -> float:
        """Return the share of tokens that may be lost at this K.

        The share grows with each doubling, and is the whole limit before K = E. MoC-System doubles K when the lost
        share exceeds "its limit", and does not say which part of the limit that is. With equal parts the limit is kept
        as long as no failure costs more than one part.
        """
        steps = max(1, math.ceil(math.log2(self.most / self.first)))
        done = round(math.log2(experts / self.first))
        return self.limit * min(1.0, (done + 1) / steps)
