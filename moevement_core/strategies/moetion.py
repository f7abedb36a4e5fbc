"""MoEtion: a snapshot holds the non-expert state, and S of the E experts of each layer: those most at risk.

The tokens at risk of an expert are those that it processed since it was last saved. The experts most at risk have the
most of these tokens. S is a mean over the layers. A rank's own snapshots hold as many experts as it can copy from the
device. Its peers receive as many of these experts as links carry. So own snapshots and peers have different S and
different experts (Algorithm 1, lines 18 and 19). Each S follows the measurements of the job.

If two snapshots in a row hold an expert, the second one has only the gradients of the expert. A rank that restores the
expert repeats the updates with these gradients (section 5.2, Algorithm 3). After a failure all ranks go back to the
newest snapshot, and each expert to its newest saved version. Survivors have this version in their own snapshots, and
replacements get it from peers. Unless S = E, later updates of an expert are lost. The strategy counts their tokens.
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
from moevement_core.replication.placement import PlacementKind
from moevement_core.strategies.capabilities import BoostsExperts
from moevement_core.strategies.config import StrategyConfig
from moevement_core.strategies.selected import LEAST_SPAN, SelectedSchedule, Selecting
from moevement_core.strategies.strategy import Measured, StageOperators
from moevement_core.strategies.versions import MOST_REACH

FIRST_SHARE = 4
"""Divisor of the number of experts. The quotient is the number of saved experts until bandwidths are measured. In
section 4.1 of MoEtion 25% to 40% of the experts are saved."""


class MoEtion(Selecting, BoostsExperts):
    """Strategy whose snapshots hold the experts that processed the most tokens since they were last saved.

    Args:
        table: the operators of the stage.
        interval: iterations between snapshots; with 1, as in MoEtion, gradients may replace state.
        experts: S, mean number of experts of each layer in a snapshot; None for the most that copies and links allow.
        most: E, experts in the largest layer of the job; None to use the largest layer of this stage.

    Raises:
        ConfigError: too many iterations pass until every expert has been saved.
    """

    name = "moetion"
    chains_gradients = True
    is_tuned = True
    flags = frozenset({"dense_interval", "experts", "capacity_boost"})
    interval_by_default = 1
    placement = PlacementKind.REDUNDANCY
    selects_by_load = True

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> MoEtion:
        """Return the strategy of a stage; see :meth:`Strategy.of`."""
        return cls(stage.table, config.interval or 1, config.given_experts, stage.most_experts)

    def __init__(
        self, table: OperatorTable, interval: int = 1, experts: int | None = None, most: int | None = None
    ) -> None:
        most = most_experts(table) if most is None else most
        self._at_peers = first = experts or math.ceil(most / FIRST_SHARE)
        super().__init__(table, interval, first, most)
        self.settled = self._is_given = experts is not None
        self._layers = len(set(table.layers[table.is_expert].tolist()))
        self._owed: Tokens = np.zeros(len(table), dtype=np.int64)
        """Lost tokens of each expert, less the tokens that it has got through extra capacity since their loss."""

    @property
    def experts_at_peers(self) -> int:
        """Mean number of experts of each layer in the part of a snapshot that peers receive."""
        return self._at_peers

    def _choose(self, risk: np.ndarray, due: Chosen, experts: int) -> Chosen:
        """Return the experts with the most tokens at risk; a layer with more such tokens gets more experts."""
        return most_at_risk(self.table, risk, due, experts * self._layers)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return how many experts of each layer this rank leaves out of its own snapshots, and out of those for peers.

        The method returns the experts left out in place of the experts saved, because ranks agree on the largest value,
        and the slowest rank must decide. Section 4.2 of MoEtion does not count the non-expert state. This method
        subtracts the bytes of that state from what copies and links can carry, before it counts the experts that fit.
        """
        seconds = measured.iteration_s * self.interval
        links = measured.replication_bytes_per_s / measured.replicas if measured.replicas else math.inf
        assert isinstance(now, SelectedSchedule)
        own = self._carried(seconds * measured.d2h_bytes_per_s, now.rounds[-1])
        return self.most - own, self.most - min(own, self._carried(seconds * links, now.at_peers[-1]))

    def _carried(self, budget: float, newest: Contents) -> int:
        """Return S, the mean number of experts of each layer for which ``budget`` is enough.

        A snapshot has either the full state of an expert or only its gradients. At least one of :attr:`span` snapshots
        has the full state. If every snapshot holds all experts, all the other snapshots have gradients. If snapshots
        leave experts out, gradients are rarer. Their share is then estimated from the newest snapshot.

        Args:
            budget: bytes that a rank may save from one snapshot to the next.
            newest: contents of the newest snapshot, or of the part of it that peers receive.
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

    def _take(self, sizes: tuple[int, ...]) -> None:
        """Save as many experts in own snapshots, and as many of them at peers, as the slowest rank can save."""
        own, at_peers = sizes
        self.experts, self._at_peers = self.most - own, self.most - at_peers

    def caution(self) -> str | None:
        """Return a warning, unless every snapshot is sure to hold all experts."""
        if self.experts >= self.most and self.settled:
            return None
        how_many = f"{self.experts} of {self.most}" if self.settled else f"up to {self.most} (as measured)"
        return (
            f"a snapshot holds {how_many} experts of each layer, those with the most tokens at risk; a failure loses "
            "updates of the others, so the result of training then differs from that of a run without failures"
        )

    # Extra capacity (section 6)

    def boosted_experts(self) -> Collection[str]:
        """Return the experts that still get extra capacity, because a recovery lost some of their tokens."""
        return [self.table.names[place] for place in np.flatnonzero(self._owed)]

    @property
    def tokens_owed(self) -> int:
        """Lost tokens of all experts of the stage, less those that extra capacity has admitted since their loss."""
        return int(self._owed.sum())

    def observe_extra_tokens(self, tokens: Scores) -> None:
        """Subtract from :attr:`tokens_owed` the tokens that experts accepted only because of extra capacity."""
        self._owed = np.maximum(0, self._owed - np.rint(tokens).astype(np.int64))

    # After a failure

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any], tokens_of_run: int | None = None) -> LostTokens:
        """Restore token counts and numbers of saved experts from the run's last snapshot, and return the lost tokens.

        The lost tokens are added to :attr:`tokens_owed`.
        """
        then = learned[run.last]
        if not self._is_given:
            self.experts, self._at_peers = then["experts"], then.get("experts_at_peers", then["experts"])
        lost = super().restored(run, learned, tokens_of_run)
        self._owed = _owed(then, len(self.table))
        for name, tokens in lost.by_expert.items():
            self._owed[self.table.index_of[name]] += tokens
        return lost

    def learned(self) -> Any:
        """Return the learned state as plain data, with the lost tokens for which experts still get extra capacity."""
        return {**super().learned(), "experts_at_peers": self._at_peers, "owed": self._owed}

    def adopt(self, learned: Any) -> None:
        """Take over the result of :meth:`learned` from another rank."""
        super().adopt(learned)
        self._at_peers = learned.get("experts_at_peers", learned["experts"])
        self._owed = _owed(learned, len(self.table))


def _owed(learned: Mapping[str, Any], operators: int) -> Tokens:
    """Return the lost tokens for which each expert still gets extra capacity, as :meth:`MoEtion.learned` recorded them.

    The result is all zeros if ``learned`` has no such record.
    """
    owed: Tokens = learned["owed"].copy() if "owed" in learned else np.zeros(operators, dtype=np.int64)
    return owed
