"""MoEtion: a snapshot holds all state but the experts, and those S of the E experts with the most tokens at risk.

A rank keeps as many experts in its own snapshots as copies from the device carry, and its peers receive as many of them
as links carry: each place has its own S and its own selection (Algorithm 1, lines 18 and 19). Both follow the
measurements of the job. If the previous snapshot holds an expert as well, the new one holds only the gradients of this
expert. A rank that restores the expert repeats the updates with these gradients (section 5.2, Algorithm 3). After a
failure all ranks go back to the newest snapshot, and each expert goes back to its newest version: survivors have it in
their own snapshots, and a lost rank's experts come from peers. Unless S = E, later updates of an expert are lost. The
strategy counts the tokens of lost updates.
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
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.policy.tokens_at_risk import Chosen, most_at_risk
from moevement_core.strategies.selected import LEAST_SPAN, SelectedSchedule, Selecting
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
    is_tuned = True

    def __init__(
        self, table: OperatorTable, interval: int = 1, experts: int | None = None, most: int | None = None
    ) -> None:
        most = most_experts(table) if most is None else most
        self._at_peers = first = experts or math.ceil(most / FIRST_SHARE)
        super().__init__(table, interval, first, most)
        self.settled = self._is_given = experts is not None
        self._layers = len(set(table.layers[table.is_expert].tolist()))
        self._owed: Tokens = np.zeros(len(table), dtype=np.int64)
        """Tokens of each expert that recoveries lost, and for which extra capacity has not made up yet."""

    @property
    def experts_at_peers(self) -> int:
        """S for the part of a snapshot that peers receive."""
        return self._at_peers

    def choose(self, risk: np.ndarray, due: Chosen, experts: int) -> Chosen:
        """Return the experts with the most tokens at risk. Layers with more tokens get more experts (Algorithm 1)."""
        return most_at_risk(self.table, risk, due, experts * self._layers)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return how many experts of each layer this rank has to leave out: of its own snapshots, and at peers.

        The budgets (section 4.2) first cover the non-expert state, which the paper does not count.
        """
        seconds = measured.iteration_s * self.interval
        links = measured.replication_bytes_per_s / measured.replicas if measured.replicas else math.inf
        assert isinstance(now, SelectedSchedule)
        own = self._carried(seconds * measured.d2h_bytes_per_s, now.rounds[-1])
        return self.most - own, self.most - min(own, self._carried(seconds * links, now.at_peers[-1]))

    def _carried(self, budget: float, newest: Contents) -> int:
        """Return S for a budget in bytes. An expert costs what is saved of it: its full state, or its gradients.

        An expert is saved in full once in :attr:`span` snapshots, at least. If all experts are saved, all other
        snapshots have its gradients. Otherwise it is not in every snapshot, so fewer snapshots have its gradients;
        their share comes from the newest snapshot.

        Args:
            budget: bytes that one rank may save in the time between two snapshots.
            newest: contents of the newest snapshot, or of the part that peers receive.
        """
        # The full state of every expert has to be saved within MOST_REACH iterations; see :attr:`span`.
        fewest = math.ceil(self.most / max(1, MOST_REACH // self.interval // 2))
        is_expert = self.table.is_expert
        is_chained = self.interval == 1
        saved = newest[is_expert & (newest != Saved.OMITTED)]
        continued = min(float((saved == Saved.GRADIENT).mean()), 1 - 1 / self.span) if len(saved) else 0.0
        carried = self.most
        for rank in range(self.table.full.shape[0]):
            full, gradients = (int(matrix[rank, is_expert].sum()) for matrix in (self.table.full, self.table.gradient))
            left = max(0.0, budget - int(self.table.full[rank, ~is_expert].sum()))
            all_continued = 1 - 1 / LEAST_SPAN if is_chained else 0.0
            if full and left < full + all_continued * (gradients - full):
                of_part = full + continued * (gradients - full)
                carried = min(carried, self.most - 1, math.floor(self.most * left / of_part))
        return max(fewest, carried)

    def take(self, sizes: tuple[int, ...]) -> None:
        """Set S of both places to the numbers of experts that the slowest rank can save."""
        own, at_peers = sizes
        self.experts, self._at_peers = self.most - own, self.most - at_peers

    def caution(self) -> str | None:
        """Return a warning if snapshots leave experts out, or may do so."""
        if self.experts >= self.most and self.settled:
            return None
        how_many = f"{self.experts} of {self.most}" if self.settled else f"up to {self.most} (as measured)"
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
            self.experts, self._at_peers = then["experts"], then.get("experts_at_peers", then["experts"])
        lost = super().restored(run, learned, tokens_of_run)
        self._owed = _owed(then, len(self.table))
        for name, tokens in lost.by_expert.items():
            self._owed[self.table.index_of[name]] += tokens
        return lost

    def learned(self) -> Any:
        """Return the learned state as plain data, with each expert's part of :attr:`tokens_owed`."""
        return {**super().learned(), "experts_at_peers": self._at_peers, "owed": self._owed}

    def adopt(self, learned: Any) -> None:
        """Take over the result of :meth:`learned` on another rank."""
        super().adopt(learned)
        self._at_peers = learned.get("experts_at_peers", learned["experts"])
        self._owed = _owed(learned, len(self.table))


def _owed(learned: Mapping[str, Any], operators: int) -> Tokens:
    """Return each expert's part of :attr:`MoEtion.tokens_owed`; zeros if ``learned`` does not record it."""
    owed: Tokens = learned["owed"].copy() if "owed" in learned else np.zeros(operators, dtype=np.int64)
    return owed
