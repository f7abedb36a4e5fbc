"""MoEtion: a snapshot holds all state but the experts, and those S of the E experts with the most tokens at risk.

If the previous snapshot holds an expert as well, the new one holds only the gradients of this expert. A rank that
restores the expert repeats the updates with these gradients (sections 4.3 and 5.2, Algorithms 1 and 3). After a failure
all ranks go back to the newest snapshot, and each expert goes back to its newest saved version. Unless S = E, later
updates of an expert are lost. The strategy counts the tokens of lost updates.
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
"""Divisor of E that gives S until bandwidths are measured.

In section 4.1 of the paper S is 25% to 40% of E.
"""


class MoEtion(Selecting):
    """Strategy that saves the experts with the most tokens at risk in every snapshot.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots; with 1, as in the paper, gradients may replace state.
        experts: S, mean number of experts of each layer in a snapshot; None for the most that copies and links allow.
        most: E, experts in the largest layer of the job; None to use the largest layer of this stage.

    Raises:
        ConfigError: too many iterations pass until every expert has been saved.
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
        """Tokens of each expert that recoveries lost, and for which extra capacity has not made up yet."""

    def choose(self, risk: np.ndarray, due: Chosen) -> Chosen:
        """Return the experts with the most tokens at risk. Layers with more tokens get more experts (Algorithm 1)."""
        return most_at_risk(self.table, risk, due, self.experts * self._layers)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return the number of experts of each layer that a snapshot of this rank has to leave out (section 4.2).

        The budgets of copies and links first cover the non-expert state, which the paper does not count.
        """
        expert, other = (self.table.full[:, mask].sum(axis=1) for mask in (self.table.is_expert, ~self.table.is_expert))
        budget = (
            measured.iteration_s
            * self.interval
            * min(measured.d2h_bytes_per_s, measured.replication_bytes_per_s / max(1, measured.replicas))
        )
        carried = min(
            (max(0.0, budget - beside) / nbytes for beside, nbytes in zip(other, expert, strict=True) if nbytes),
            default=1.0,
        )
        # The full state of every expert has to be saved within MOST_REACH iterations; see :attr:`span`.
        fewest = math.ceil(self.most / max(1, MOST_REACH // self.interval // 2))
        return (self.most - max(fewest, math.floor(self.most * min(1.0, carried))),)

    def take(self, sizes: tuple[int, ...]) -> None:
        """Set S to the number of experts that the slowest rank can save."""
        self.experts = self.most - sizes[0]

    def caution(self) -> str | None:
        """Return a warning if snapshots leave experts out, or may do so."""
        if self.experts >= self.most and self.settled:
            return None
        how_many = f"{self.experts} of {self.most}" if self.settled else f"up to {self.most} (to be measured)"
        return (
            f"a snapshot holds {how_many} experts of each layer, those with the most tokens at risk; a failure loses "
            "updates of the others, so the result of training then differs from that of a run without failures"
        )

    # Extra capacity (section 6)

    def boosted_experts(self) -> Collection[str]:
        """Return the experts that still need extra capacity, because a recovery lost some of their tokens."""
        return [self.table.names[place] for place in np.flatnonzero(self._owed)]

    @property
    def tokens_owed(self) -> int:
        """Lost tokens for which extra capacity has not made up yet, over all experts of the stage."""
        return int(self._owed.sum())

    def observe_extra_tokens(self, tokens: Scores) -> None:
        """Subtract the tokens that extra capacity admitted from :attr:`tokens_owed`."""
        self._owed = np.maximum(0, self._owed - np.rint(tokens).astype(np.int64))

    # After a failure

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any], tokens_of_run: int | None = None) -> LostTokens:
        """Restore the snapshot's S and token account, and return the lost tokens; :attr:`tokens_owed` includes them."""
        then = learned[run.last]
        if not self._is_given:
            self.experts, self.settled = then["experts"], then["settled"]
        lost = super().restored(run, learned, tokens_of_run)
        self._owed = _owed(then, len(self.table))
        for name, tokens in lost.by_expert.items():
            self._owed[self.table.index_of[name]] += tokens
        return lost

    def learned(self) -> Any:
        """Return the learned state as plain data, with each expert's part of :attr:`tokens_owed`."""
        return {**super().learned(), "settled": self.settled, "owed": self._owed}

    def adopt(self, learned: Any) -> None:
        """Take over the result of :meth:`learned` on another rank."""
        super().adopt(learned)
        self._owed = _owed(learned, len(self.table))


def _owed(learned: Mapping[str, Any], operators: int) -> Tokens:
    """Return each expert's part of :attr:`MoEtion.tokens_owed`; zeros if ``learned`` does not record it."""
    owed: Tokens = learned["owed"].copy() if "owed" in learned else np.zeros(operators, dtype=np.int64)
    return owed
