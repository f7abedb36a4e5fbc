"""MoEtion: everything but the experts in every snapshot, and the S of E experts with the most tokens at risk.

An expert that the snapshot before holds, too, is there by its gradients alone: whoever restores it makes its updates
again (sections 4.3 and 5.2, Algorithms 1 and 3). After a failure all ranks go back to the newest snapshot, and each
expert to its newest version; updates in between are lost, and the tokens behind them counted, unless S = E.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import LostTokens, Tokens, most_experts
from moevement_core.policy.popularity import Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Schedule
from moevement_core.policy.tokens_at_risk import Chosen, most_at_risk
from moevement_core.strategies.selected import Selecting
from moevement_core.strategies.strategy import Measured
from moevement_core.strategies.versions import MOST_REACH

FIRST_SHARE = 4
"""Of the experts a quarter is saved until bandwidths are measured: S is 25% to 40% of E in section 4.1."""


class MoEtion(Selecting):
    """The experts with the most tokens at risk in every snapshot.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots. Gradients take the place of state where it is 1, as in the paper.
        experts: S, of each layer on average; None: as many as both budgets carry.
        most: E, of the layer of the job that has the most; None: of this stage.

    Raises:
        ConfigError: it takes too long until every expert has been saved.
    """

    name = "moetion"
    chains_gradients = True

    def __init__(
        self, table: OperatorTable, interval: int = 1, experts: int | None = None, most: int | None = None
    ) -> None:
        most = most_experts(table) if most is None else most
        super().__init__(table, interval, experts or math.ceil(most / FIRST_SHARE), most)
        self.settled = self._is_given = experts is not None
        self._layers = len(set(table.layers[table.is_expert].tolist()))
        self._owed: Tokens = np.zeros(len(table), dtype=np.int64)
        """Tokens that recoveries cost each expert and that more room has not let in yet."""

    def choose(self, risk: np.ndarray, due: Chosen) -> Chosen:
        """Shared over the layers by their tokens (Algorithm 1)."""
        return most_at_risk(self.table, risk, due, self.experts * self._layers)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """How many experts of each layer neither budget has room for (section 4.2), on the rank that has the least.

        What is left for experts is what the state beside them does not take; the paper does not count that.
        """
        expert, other = (self.table.full[:, mask].sum(axis=1) for mask in (self.table.is_expert, ~self.table.is_expert))
        budget = (
            measured.iteration_s
            * self.interval
            * min(measured.d2h_bytes_per_s, measured.replication_bytes_per_s / max(1, measured.replicas))
        )
        carried = min(
            (max(0.0, budget - beside) / its for beside, its in zip(other, expert, strict=True) if its), default=1.0
        )
        # Every expert's full state within MOST_REACH; see :attr:`span`.
        fewest = math.ceil(self.most / max(1, MOST_REACH // self.interval // 2))
        return (self.most - max(fewest, math.floor(self.most * min(1.0, carried))),)

    def take(self, sizes: tuple[int, ...]) -> None:
        """S, of the rank that can save the fewest."""
        self.experts = self.most - sizes[0]

    def caution(self) -> str | None:
        """Where experts may be left out."""
        if self.experts >= self.most and self.settled:
            return None
        how_many = f"{self.experts} of {self.most}" if self.settled else f"as many of {self.most} as is measured"
        return (
            f"a snapshot holds {how_many} experts of each layer, those with the most tokens at risk: a failure loses "
            "updates of the others, and what is trained after it is not what would have been trained without it"
        )

    # More room (section 6)

    def short_of_tokens(self) -> Collection[str]:
        """Those that a recovery cost updates, until as many tokens more have come."""
        return [self.table.names[place] for place in np.flatnonzero(self._owed)]

    @property
    def tokens_owed(self) -> int:
        """Of all of them."""
        return int(self._owed.sum())

    def let_in(self, tokens: Scores) -> None:
        """They are repaid."""
        self._owed = np.maximum(0, self._owed - np.rint(tokens).astype(np.int64))

    # After a failure

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any]) -> LostTokens:
        """As of the newest snapshot."""
        then = learned[run.last]
        if not self._is_given:
            self.experts, self.settled = then["experts"], then["settled"]
        lost = super().restored(run, learned)
        self._owed = _owed(then, len(self.table))
        for name, tokens in lost.by_expert.items():
            self._owed[self.table.index_of[name]] += tokens
        return lost

    def learned(self) -> Any:
        """Plain data."""
        return {**super().learned(), "settled": self.settled, "owed": self._owed}

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        super().adopt(learned)
        self._owed = _owed(learned, len(self.table))


def _owed(learned: Mapping[str, Any], operators: int) -> Tokens:
    """Nothing in windows on disk from before there was anything to be owed."""
    owed: Tokens = learned["owed"].copy() if "owed" in learned else np.zeros(operators, dtype=np.int64)
    return owed
