"""Trigger of a new order of operators at a window boundary, if popularity has changed (MoEvement section 3.5)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Scores, checked


@dataclass(frozen=True, slots=True)
class ReorderThresholds:
    """Thresholds: how much popularity must change before operators get a new order."""

    share_change: float = 0.10
    """Relative change of an expert's activation share. The expert counts as changed above this value."""
    fraction: float = 0.25
    """Fraction of the experts. A new order is made if at least this fraction has changed (MoEvement, section 3.5)."""

    def __post_init__(self) -> None:
        for name, most in (("share_change", np.inf), ("fraction", 1.0)):
            value = getattr(self, name)
            if not 0.0 <= value <= most:
                raise ConfigError(f"reorder threshold {name} is {value}; needs 0 to {most}")


@dataclass(slots=True)
class ReorderTrigger:
    """Comparison of the present popularity with the popularity from which the current order was made.

    Callers use it only at window boundaries, because an order holds for whole windows. All ranks that share operators
    must pass the same scores, so that they get the same answer.
    """

    table: OperatorTable
    thresholds: ReorderThresholds = field(default_factory=ReorderThresholds)
    reference: Scores | None = None
    """Scores from which the current order was made; a recovery restores them."""

    def ordered(self, scores: Scores) -> None:
        """Record that the operators have been ordered by ``scores``."""
        self.reference = checked(self.table, scores, "score").copy()

    def changed_fraction(self, scores: Scores) -> float:
        """Return the fraction of the experts that count as changed; 0 if there are no experts.

        The activation share of an expert is its score, divided by the sum of scores in its layer. If the share was zero
        before, any positive share is a change. Before the first order every expert counts as changed.
        """
        experts = np.flatnonzero(self.table.is_expert)
        if not len(experts):
            return 0.0
        if self.reference is None:
            return 1.0
        layers = self.table.layers[experts]
        before, now = self.reference[experts], checked(self.table, scores, "score")[experts]
        before_total, now_total = _layer_totals(before, layers), _layer_totals(now, layers)
        # Both shares are multiplied by both totals, so that whole counts compare exactly.
        change = np.abs(now * before_total - before * now_total)
        return float(np.mean(change > self.thresholds.share_change * before * now_total))

    def should_reorder(self, scores: Scores) -> bool:
        """Return True if enough experts have changed. The caller then makes a new order and calls :meth:`ordered`."""
        changed = self.changed_fraction(scores)
        return changed > 0.0 and changed >= self.thresholds.fraction


def _layer_totals(scores: Scores, layers: npt.NDArray[np.int64]) -> Scores:
    """Return for each expert the sum of scores over its layer; 1 replaces a sum of zero, so that shares are defined."""
    totals = np.bincount(layers, weights=scores)[layers]
    return np.where(totals > 0, totals, 1.0)
