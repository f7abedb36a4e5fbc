"""MoC-System with load-aware selection: saves the experts with the most unsaved updates (section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.dynamic_k import PLT_LIMIT, DynamicK
from moevement_core.policy.partial_experts import LostTokens, most_experts
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Schedule
from moevement_core.policy.tokens_at_risk import Chosen, most_of_each_layer
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.moc import INTERVAL, MoC, caution_of
from moevement_core.strategies.selected import Selecting
from moevement_core.strategies.strategy import Measured, StageOperators


class MoCByLoad(Selecting):
    """Strategy that saves the experts of each layer with the most unsaved updates.

    After a failure all ranks go back to the newest snapshot, and each expert to its newest saved state.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots.
        experts: K, number of experts of each layer in a snapshot; None for an eighth of the experts.
        most: E, experts in the largest layer of the job; None to use the largest layer of this stage.
        limit: share of lost tokens above which K grows.

    Raises:
        ConfigError: too many iterations pass until every expert has been saved.
    """

    name = "moc-by-load"
    is_tuned = True
    flags = MoC.flags
    interval_by_default = INTERVAL
    selects_by_load = True

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> MoCByLoad:
        """Return the strategy of a stage; see :meth:`Strategy.of`."""
        return cls(
            stage.table, config.interval or INTERVAL, experts=config.given_experts, limit=config.lost_limit,
            most=stage.most_experts,
        )  # fmt: skip

    def __init__(
        self,
        table: OperatorTable,
        interval: int = INTERVAL,
        experts: int | None = None,
        limit: float = PLT_LIMIT,
        most: int | None = None,
    ) -> None:
        most = most_experts(table) if most is None else most
        self._dynamic = DynamicK.of(experts, most, limit)
        super().__init__(table, interval, self._dynamic.first, most)
        self.settled = False
        self._wanted = self.experts
        """Number of experts of each layer that snapshots should hold, because of the tokens that this stage lost.

        Snapshots of all stages hold the largest of the numbers that the stages want.
        """

    def _choose(self, risk: np.ndarray, due: Chosen, experts: int) -> Chosen:
        """Return ``experts`` experts of each layer: ``due``, then those with the most tokens since their last save."""
        return most_of_each_layer(self.table, risk, due, experts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return how many experts of each layer snapshots should hold, because of the tokens that this stage lost."""
        return (self._wanted,)

    def _take(self, sizes: tuple[int, ...]) -> None:
        """Save as many experts of each layer as the stage that wants the most experts saved (``sizes``)."""
        self.experts = sizes[0]

    def caution(self) -> str | None:
        """Return a warning if snapshots leave experts out."""
        return caution_of(self.experts, self.most)

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any], tokens_of_run: int | None = None) -> LostTokens:
        """Restore the number of saved experts from the restored snapshot, and return the lost tokens.

        If too many tokens are lost, :meth:`wanted_sizes` returns more experts from then on.
        """
        lost = super().restored(run, learned, tokens_of_run)
        self.experts = learned[run.last]["experts"]
        self._wanted = self._dynamic.after(max(self._wanted, self.experts), lost.proportion)
        return lost

    def learned(self) -> Any:
        """Return the learned state as plain data, with the number of experts that this stage wants to save."""
        return {**super().learned(), "wanted": self._wanted}

    def adopt(self, learned: Any) -> None:
        """Take over the result of :meth:`learned` from another rank."""
        super().adopt(learned)
        self._wanted = learned["wanted"]
