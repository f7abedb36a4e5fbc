"""Growth of the number of saved experts as tokens are lost (MoC-System, section 5.3, "Dynamic-K")."""

from __future__ import annotations

import math
from dataclasses import dataclass

PLT_LIMIT = 0.0375
"""Default limit: the largest share of lost tokens that did not lower accuracy in MoC-System (section 3.1.2)."""
FIRST_SHARE = 8
"""Divisor of E, the number of experts. The quotient is the first K, unless the user configures K."""


@dataclass(frozen=True)
class DynamicK:
    """Rule for K, the number of saved experts: K doubles as more tokens are lost, until all experts are saved."""

    first: int
    """First value of K, the number of saved experts."""
    most: int
    """E, the number of experts, which K never exceeds."""
    limit: float
    """Share of the run's tokens that recoveries may lose before all experts are saved; with 1, K never changes."""

    @staticmethod
    def of(experts: int | None, most: int, limit: float) -> DynamicK:
        """Return a rule that first saves ``experts`` of ``most`` experts; None stands for an eighth of them."""
        return DynamicK(min(experts or math.ceil(most / FIRST_SHARE), most), most, limit)

    def after(self, experts: int, proportion: float) -> int:
        """Return the new K, the number of saved experts.

        Args:
            experts: present K.
            proportion: share of the tokens of the whole run that recoveries have lost (MoC-System, equation 7).
        """
        while self.limit < 1 and experts < self.most and proportion > self._share_of_limit(experts):
            experts = min(2 * experts, self.most)
        return experts

    def _share_of_limit(self, experts: int) -> float:
        """Return the share of tokens that may be lost before the job saves more than ``experts`` experts.

        The number of saved experts doubles from :attr:`first` up to :attr:`most`. :attr:`limit` is divided into as many
        equal parts as there are doublings, and each doubling allows the loss of one more part. MoC-System says only
        that the number doubles when the lost share exceeds "its limit". With equal parts, the losses stay within the
        limit as long as no single failure costs more than one part.
        """
        steps = max(1, math.ceil(math.log2(self.most / self.first)))
        done = round(math.log2(experts / self.first))
        return self.limit * min(1.0, (done + 1) / steps)
