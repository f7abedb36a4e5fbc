"""Strategies that save some experts and lose the newest updates of the others: MoC-System and MoEtion."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moevement_core.operators import OperatorKind
from moevement_core.simulator.strategies.base import Costs, Recovery, Strategy, TokenLoss, popularity

GRADIENT_BYTES = 2
"""Bytes of an element of a gradient that is sent in place of state (MoEtion, section 5.2)."""


class Partial(Strategy):
    """Everything but the experts, and some experts, every ``interval`` iterations; every stage rolls back to that."""

    def __init__(self, costs: Costs, interval: int = 1) -> None:
        super().__init__(costs)
        self._interval = interval
        stage = max(costs.plan.stages, key=lambda one: one.full_bytes)
        pairs = list(zip(stage.operators, stage.table.full[0].tolist(), strict=True))
        experts = [(one, size) for one, size in pairs if one.kind is OperatorKind.EXPERT]
        self.expert_bytes = sum(size for _, size in experts)
        self.other_bytes = sum(size for one, size in pairs if one.kind is not OperatorKind.EXPERT)
        self.layers = max(1, sum(one.kind is OperatorKind.GATE for one, _ in pairs))
        self.experts = max(1, round(len(experts) / self.layers * costs.plan.given.job.expert_parallel))
        """Experts of a layer, on all ranks that share it."""
        self.parameters = sum(one.parameters / one.shards for one, _ in experts)
        """Parameters of the experts of a rank, of which it holds the state."""

    @property
    def interval(self) -> int:
        """Iterations from one snapshot to the next, as given."""
        return self._interval

    @cached_property
    def popularity(self) -> npt.NDArray[np.float64]:
        """Share of the tokens of a layer by expert, ``[layers, experts]``."""
        return popularity(self.costs.skew, self.experts, self.layers, np.random.default_rng(self.costs.skew_seed))

    @property
    def fetch_s(self) -> float:
        """Seconds to fetch all state of a rank from a peer."""
        return self.costs.fetch_s(self.costs.full_bytes)

    @property
    def overhead_s(self) -> float:
        """Seconds of an iteration that do not hide behind the interval."""
        behind_s = max(0.0, self.busy_s - self.interval * self.costs.iteration_s)
        return behind_s / self.interval + self.slowed_s

    @property
    @abstractmethod
    def snapshot_bytes(self) -> float:
        """Bytes of one snapshot of the heaviest rank."""

    @property
    def copied_bytes(self) -> float:
        """A snapshot, spread over the interval."""
        return self.snapshot_bytes / self.interval

    @property
    def sent_bytes(self) -> float:
        """Bytes sent to each peer: as many as are copied."""
        return self.copied_bytes

    @property
    def host_bytes(self) -> float:
        """The newest state of everything, and what is being copied; as much for each peer."""
        return (self.costs.full_bytes + self.snapshot_bytes) * (1 + self.costs.plan.given.replicas)

    @property
    def arrival(self) -> float:
        """Iterations until a snapshot is with all peers."""
        return self.busy_s / self.costs.iteration_s

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds that it takes there."""

    def rollback(self, committed: int, into: float) -> int:
        """Return the iterations back to the newest snapshot that is complete."""
        there = max(0, self.newest(committed, into, self.arrival))
        return committed - there // self.interval * self.interval

    @property
    def expected_rollback(self) -> float:
        """Half the interval, and what is on its way."""
        return self.arrival + self.interval / 2

    def loses(self, ages: npt.NDArray[np.float64]) -> float:
        """Updates of experts of these ages, as a share of the tokens of an iteration, times iterations (its PLT)."""
        return float((self.popularity * ages).sum()) / self.layers


class MoC(Partial):
    """K experts of each layer in every snapshot, one after the other; K doubles when too much is lost."""

    name = "moc"

    def __init__(
        self, costs: Costs, experts_saved: int = 0, budget: TokenLoss | None = None, interval: int = 1
    ) -> None:
        super().__init__(costs, interval)
        # An eighth of the experts is what both papers start it with.
        saved = experts_saved or max(1, self.experts // 8)
        self.experts_saved = self._first_saved = min(saved, self.experts)
        self.budget = budget or TokenLoss()

    def fresh(self) -> Strategy:
        """Return a strategy that has lost nothing yet."""
        return MoC(self.costs, self._first_saved, TokenLoss(self.budget.threshold), self.interval)

    @property
    def snapshot_bytes(self) -> float:
        """Non-experts, and the share of the experts."""
        return self.other_bytes + self.expert_bytes * self.experts_saved / self.experts

    @property
    def busy_s(self) -> float:
        """Copies and sends go on at the same time."""
        return max(self.costs.copy_s(self.snapshot_bytes), self.costs.send_s(self.snapshot_bytes))

    def ages(self, committed: int) -> npt.NDArray[np.float64]:
        """Iterations since each expert was saved, ``[experts]``; their turn comes every E / K snapshots."""
        turns = math.ceil(self.experts / self.experts_saved)
        turn = np.arange(self.experts) // self.experts_saved
        snapshots = committed // self.interval
        return np.minimum((snapshots - turn) % turns * self.interval, committed).astype(np.float64)

    def recover(self, committed: int, nodes: Collection[int] = (0,), into: float = 0.5) -> Recovery:
        """Experts come back as they were up to E / K iterations ago; those updates are lost."""
        made = super().recover(committed, nodes, into)
        if made.from_storage:
            return made
        lost = self.loses(self.ages(committed))
        self.budget.lost += lost
        if committed and self.budget.lost / committed > self.budget.threshold:
            self.experts_saved = min(self.experts, 2 * self.experts_saved)
        return replace(made, tokens_lost=lost)


class MoEtion(Partial):
    """Strategy that saves as many experts as both budgets carry, those with the most tokens at risk first (MoEtion,
    Algorithm 1).

    The network's budget goes further than the copies': what data-parallel peers hold anyway is not sent (section 5.1),
    and for experts that were saved the last time too only gradients are (section 5.2).
    """

    name = "moetion"

    def __init__(self, costs: Costs, interval: int = 1) -> None:
        super().__init__(costs, interval)
        self.is_redundant = any(one.shards > 1 for one in costs.plan.stages[0].shape.operators)
        each = self.expert_bytes / max(1, self.layers * self.experts)
        seconds = costs.iteration_s * interval
        local = costs.plan.given.cluster.d2h_bytes_per_s * seconds - self.other_bytes
        remote = costs.plan.given.cluster.replication_bytes_per_s * seconds / max(1, costs.plan.given.replicas) - (
            0 if self.is_redundant else self.other_bytes
        )
        sent = min(each, self.parameters / max(1, self.layers * self.experts) * GRADIENT_BYTES)
        fits = min(local / each, remote / sent) if each else math.inf
        self.experts_saved = max(1, min(self.experts, math.floor(fits / self.layers)))
        """S, of each layer (the mean; layers with more tokens at risk have more)."""
        self._sent = self.experts_saved * self.layers * sent

    @property
    def snapshot_bytes(self) -> float:
        """Non-experts, and S experts of each layer."""
        return self.other_bytes + self.expert_bytes * self.experts_saved / self.experts

    @property
    def sent_bytes(self) -> float:
        """Bytes to each peer, in an average iteration."""
        return (self._sent + (0 if self.is_redundant else self.other_bytes)) / self.interval

    @property
    def busy_s(self) -> float:
        """Copies and sends go on at the same time."""
        return max(self.costs.copy_s(self.snapshot_bytes), self.costs.send_s(self.sent_bytes * self.interval))

    @cached_property
    def at_risk(self) -> float:
        """Updates that a failure loses, on average: the selection is run for a while and its tokens at risk counted."""
        if self.experts_saved >= self.experts:
            return 0.0
        risk, seen, steps = np.zeros_like(self.popularity), [], 4 * self.experts
        total = self.experts_saved * self.layers
        for step in range(steps):
            risk += self.popularity * self.interval
            # The shares of the layers are proportional to their risk; taking the riskiest of all experts makes them so.
            chosen = np.argpartition(risk.ravel(), -total)[-total:]
            risk.ravel()[chosen] = 0.0
            if step >= steps // 2:
                seen.append(risk.sum() / self.layers)
        return float(np.mean(seen))

    def recover(self, committed: int, nodes: Collection[int] = (0,), into: float = 0.5) -> Recovery:
        """Experts that were not saved come back as they were when they last were."""
        made = super().recover(committed, nodes, into)
        return made if made.from_storage else replace(made, tokens_lost=min(self.at_risk, float(committed)))
