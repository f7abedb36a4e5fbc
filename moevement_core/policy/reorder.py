"""Trigger for a new order of operators (MoEvement section 3.5): at a window boundary, if popularity has changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Scores, checked


@dataclass(frozen=True, slots=True)
class ReorderThresholds:
    """Thresholds of the change that triggers a new order."""

    share_change: float = 0.10
    """Relative change of an expert's activation share beyond which it counts as changed."""
    fraction: float = 0.25
    """Share of the experts; more than this must have changed."""

    def __post_init__(self) -> None:
        for name, most in (("share_change", np.inf), ("fraction", 1.0)):
            value = getattr(self, name)
            if not 0.0 <= value <= most:
                raise ConfigError(f"reorder threshold {name} of {value}; needs 0 to {most}")


@dataclass(slots=True)
class ReorderTrigger:
    """Comparison of the popularity now with the popularity that the current order was made from.

    Callers ask only at window boundaries, because an order holds for whole windows. All ranks that share operators ask
    with the same scores and get the same answer.
    """

    table: OperatorTable
    thresholds: ReorderThresholds = field(default_factory=ReorderThresholds)
    reference: Scores | None = None
    """Scores that the current order was made from; a recovery restores them."""

    def ordered(self, scores: Scores) -> None:
        """Note that the operators were ordered by ``scores``."""
        self.reference = checked(self.table, scores, "score").copy()

    def changed_fraction(self, scores: Scores) -> float:
        """Return the fraction of the experts whose activation share has changed enough, 0 if there are none.

        A share is the expert's part of the scores of its layer. If the former share was zero, any tokens are a change.
        Before the first order every expert counts as changed.
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
        """Return True if enough experts have changed; the caller that acts on it calls :meth:`ordered`."""
        return self.changed_fraction(scores) > self.thresholds.fraction


def _layer_totals(scores: Scores, layers: npt.NDArray[np.int64]) -> Scores:
    """Return for each expert the sum of scores over its layer; 1 replaces a sum of zero, so that shares are defined."""
    totals = np.bincount(layers, weights=scores)[layers]
    return np.where(totals > 0, totals, 1.0)
