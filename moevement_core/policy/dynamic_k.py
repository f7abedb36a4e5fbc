"""Growth of the number of saved experts as tokens are lost (MoC-System, section 5.3, "Dynamic-K")."""

from __future__ import annotations

import math
from dataclasses import dataclass

PLT_LIMIT = 0.0375
"""Share of lost tokens up to which no harm was found (section 3.1.2)."""
FIRST_SHARE = 8
"""Divisor of E for the first number of saved experts: an eighth, unless it is given."""


@dataclass(frozen=True)
class DynamicK:
    """K is doubled while the share of lost tokens surpasses its limit, until it is E."""

    first: int
    """K at first."""
    most: int
    """E."""
    limit: float
    """The share of all tokens that may be lost before K is E; 1: K stays what it is."""

    @staticmethod
    def of(experts: int | None, most: int, limit: float) -> DynamicK:
        """Return a policy that begins with so many experts; None: with an eighth."""
        return DynamicK(min(experts or math.ceil(most / FIRST_SHARE), most), most, limit)

    def after(self, experts: int, proportion: float) -> int:
        """Returns K from now on.

        Args:
            experts: K until now.
            proportion: of all tokens, that recoveries have lost.
        """
        while self.limit < 1 and experts < self.most and proportion > self._share_of_limit(experts):
            experts = min(2 * experts, self.most)
        return experts

    def _share_of_limit(self, experts: int) -> float:
        """Return the share of tokens that may be lost at this K: more of the limit with each doubling, and all of it
        before K = E.

        MoC-System doubles K where the share lost surpasses "its limit" and does not say which part that is; with equal
        parts the limit is kept as long as no failure costs more than one.
        """
        steps = max(1, math.ceil(math.log2(self.most / self.first)))
        done = round(math.log2(experts / self.first))
        return self.limit * min(1.0, (done + 1) / steps)
