"""Simulated strategies that save some experts and lose the newest updates of the others: their base, and MoC-System."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moevement_core.operators import OperatorKind
from moevement_core.policy.dynamic_k import PLT_LIMIT, DynamicK
from moevement_core.simulator.strategies.base import Costs, Recovery, Strategy, popularity


class Partial(Strategy):
    """Strategy that saves some of the experts and all other operators every ``interval`` iterations.

    After a failure every stage rolls back to the newest snapshot.
    """

    def __init__(self, costs: Costs, interval: int = 1) -> None:
        super().__init__(costs)
        self._interval = interval
        stage = max(costs.plan.stages, key=lambda stage: stage.full_bytes)
        self.stage = costs.plan.stages.index(stage)
        """Pipeline stage with the heaviest ranks; the strategy's bytes and seconds are those of its ranks."""
        pairs = list(zip(stage.operators, stage.table.full[0].tolist(), strict=True))
        experts = [(operator, size) for operator, size in pairs if operator.kind is OperatorKind.EXPERT]
        self.expert_bytes = sum(size for _, size in experts)
        self.other_bytes = sum(size for operator, size in pairs if operator.kind is not OperatorKind.EXPERT)
        self.layers = max(1, sum(operator.kind is OperatorKind.GATE for operator, _ in pairs))
        self.experts = max(1, round(len(experts) / self.layers * costs.plan.inputs.job.expert_parallel))
        """Number of experts of a layer, on all expert-parallel ranks together."""
        self.parameters = sum(operator.parameters / operator.shards for operator, _ in experts)
        """Number of expert parameters whose optimizer state a rank holds."""

    @property
    def interval(self) -> int:
        """Number of iterations between snapshots."""
        return self._interval

    @cached_property
    def popularity(self) -> npt.NDArray[np.float64]:
        """Share of a layer's tokens that each expert gets, ``[layers, experts]``."""
        return popularity(self.costs.skew, self.experts, self.layers, np.random.default_rng(self.costs.skew_seed))

    @property
    def fetch_s(self) -> float:
        """Seconds to fetch the whole state of a rank from a peer."""
        return self.costs.fetch_s(self.costs.full_bytes)

    @property
    def local_fetch_s(self) -> float:
        """Seconds to copy the whole state of a rank from its own host to the device."""
        return self.costs.copy_s(self.costs.full_bytes)

    @property
    def overhead_s(self) -> float:
        """Mean seconds that saving adds to an iteration.

        They have two parts: the time by which copies and sends exceed the interval, and the slow-down of training by
        copies beside it.
        """
        behind_s = max(0.0, self.busy_s - self.interval * self.costs.iteration_s)
        return behind_s / self.interval + self.slowed_s

    @property
    @abstractmethod
    def snapshot_bytes(self) -> float:
        """Bytes of one snapshot of the heaviest rank."""

    @property
    def copied_bytes(self) -> float:
        """Mean bytes that the heaviest rank copies to its host in an iteration: a snapshot divided by the interval."""
        return self.snapshot_bytes / self.interval

    @property
    def sent_bytes(self) -> float:
        """Mean bytes that the heaviest rank sends to each peer in an iteration: a snapshot divided by the interval."""
        return self.copied_bytes

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory: the newest state and the snapshot under way, for the rank itself and each replica."""
        return (self.costs.full_bytes + self.snapshot_bytes) * (1 + self.costs.plan.inputs.replicas)

    @property
    def arrival(self) -> float:
        """Iterations until all peers have a snapshot."""
        return self.busy_s / self.costs.iteration_s

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds until all peers have a snapshot."""

    def rollback(self, committed: int, into: float) -> int:
        """Return the number of iterations since the newest snapshot that all peers have."""
        there = max(0, self.newest(committed, into, self.arrival))
        return committed - there // self.interval * self.interval

    @property
    def expected_rollback(self) -> float:
        """Mean rollback in iterations: half of the interval, plus the iterations until peers have a snapshot."""
        return self.arrival + self.interval / 2

    def loses(self, ages: npt.NDArray[np.float64]) -> float:
        """Return the lost updates of experts in iterations: ages of experts, weighted by their shares of tokens.

        The sum over all failures, divided by the trained iterations, is MoC-System's PLT.

        Args:
            ages: iterations since each expert was saved, ``[experts]``.
        """
        return float((self.popularity * ages).sum()) / self.layers


class MoC(Partial):
    """Strategy that saves K experts of each layer in turn; K doubles when too many tokens are lost.

    The policy of a live job decides about K (:class:`DynamicK`).

    Args:
        costs: costs of the job.
        experts_saved: first K; 0 for an eighth of the experts, with which both papers start MoC-System.
        limit: share of lost tokens at which every expert is saved; 1 keeps K constant.
        interval: iterations between snapshots.
        is_length_known: False if K follows the share of the tokens so far, as in a live job that does not know how long
            it will train.
    """

    name = "moc"

    def __init__(
        self,
        costs: Costs,
        experts_saved: int = 0,
        limit: float = PLT_LIMIT,
        interval: int = 1,
        *,
        is_length_known: bool = True,
    ) -> None:
        super().__init__(costs, interval)
        self.dynamic = DynamicK.of(experts_saved or None, self.experts, limit)
        self.experts_saved = self.dynamic.first
        """Number of experts of each layer in a snapshot, K."""
        self.lost = 0.0
        """Updates that all failures so far have lost, in iterations as in :attr:`Recovery.tokens_lost`."""
        self._is_length_known = is_length_known
        self._recovered = 0

    def fresh(self) -> Strategy:
        """Return this strategy with its first K and without losses."""
        return MoC(
            self.costs, self.dynamic.first, self.dynamic.limit, self.interval, is_length_known=self._is_length_known
        )

    @property
    def snapshot_bytes(self) -> float:
        """Bytes of one snapshot: K of the E experts of each layer, and all other operators."""
        return self.other_bytes + self.expert_bytes * self.experts_saved / self.experts

    @property
    def busy_s(self) -> float:
        """Seconds until all peers have a snapshot; copies and sends run at the same time."""
        return max(self.costs.copy_s(self.snapshot_bytes), self.costs.send_s(self.snapshot_bytes))

    def ages(self, committed: int) -> npt.NDArray[np.float64]:
        """Return the iterations since each expert was saved, float64 ``[experts]``.

        Each expert is saved once in E / K snapshots. Iterations before the last recovery do not count, because that
        recovery has lost their updates already.
        """
        turns = math.ceil(self.experts / self.experts_saved)
        turn = np.arange(self.experts) // self.experts_saved
        newest = self._newest_snapshot(committed)
        ages = (newest // self.interval - turn) % turns * self.interval
        return np.minimum(ages, newest - self._recovered).astype(np.float64)

    def _newest_snapshot(self, committed: int) -> int:
        return committed // self.interval * self.interval

    def recover(
        self,
        committed: int,
        nodes: Collection[int] = (0,),
        into: float = 0.5,
        lost_hosts: Collection[int] | None = None,
    ) -> Recovery:
        """Return the cost of a failure. Saved experts are up to E / K snapshots old; their later updates are lost."""
        recovery = super().recover(committed, nodes, into, lost_hosts)
        if recovery.from_storage:
            return replace(recovery, experts_saved=self.experts_saved)
        lost = self.loses(self.ages(committed))
        self.lost += lost
        self._recovered = self._newest_snapshot(committed)
        # A live job that does not know its length takes its tokens so far for all of them.
        iterations = max(1, committed, self.run_iterations if self._is_length_known else 0)
        self.experts_saved = self.dynamic.after(self.experts_saved, self.lost / iterations)
        return replace(recovery, tokens_lost=lost, experts_saved=self.experts_saved)
