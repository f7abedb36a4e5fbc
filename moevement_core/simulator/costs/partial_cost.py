"""Simulated strategies that save some experts and lose the newest updates of all others: base class and MoC-System."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moevement_core.operators import OperatorKind
from moevement_core.policy.dynamic_k import PLT_LIMIT, DynamicK
from moevement_core.simulator.costs.costs import Costs, popularity
from moevement_core.simulator.costs.strategy_cost import LostState, RecoveryCost, StrategyCost


class PartialCost(StrategyCost):
    """Base of strategies that save some of the experts, and all other operators, every ``interval`` iterations.

    After a failure, every stage rolls back to the newest snapshot that all peers have.
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
        """E, the number of experts of a layer, on all expert-parallel ranks together."""
        self.parameters = sum(operator.parameters / operator.shards for operator, _ in experts)
        """Number of expert parameters for which a rank holds the optimizer state."""

    @property
    def interval(self) -> int:
        """Number of iterations from one snapshot to the next."""
        return self._interval

    @cached_property
    def popularity(self) -> npt.NDArray[np.float64]:
        """Share of a layer's tokens that each expert gets, ``[layers, experts]``."""
        return popularity(self.costs.skew, self.experts, self.layers, np.random.default_rng(self.costs.skew_seed))

    @property
    def fetch_s(self) -> float:
        """Seconds to fetch the whole state of a rank from a peer."""
        return self.costs.plan.inputs.cluster.fetch_s(self.costs.full_bytes)

    @property
    def _local_fetch_s(self) -> float:
        """Seconds to copy the whole state of a rank from its own host to the device."""
        return self.costs.copy_s(self.costs.full_bytes)

    @property
    def overhead_s(self) -> float:
        """Mean seconds that saving adds to an iteration.

        One part is the time for which training waits if copies and sends take longer than the interval. The other part
        is the slow-down of training while copies run.
        """
        behind_s = max(0.0, self.busy_s - self.interval * self.costs.iteration_s)
        return behind_s / self.interval + self.slowed_s

    @property
    @abstractmethod
    def experts_saved(self) -> int:
        """Number of experts of each layer in a snapshot; mean over layers."""

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
        """Bytes of host memory of a rank, which keeps its own snapshots and copies for the ranks whose peer it is.

        For each of these ranks and for itself, it keeps the newest saved state and a snapshot that is not complete yet.
        """
        return (self.costs.full_bytes + self.snapshot_bytes) * (1 + self.costs.plan.inputs.replicas)

    @property
    def arrival(self) -> float:
        """Iterations from the start of a snapshot until all peers have it."""
        return self.busy_s / self.costs.iteration_s

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds from the start of a snapshot until all peers have it."""

    @property
    def slowed_s(self) -> float:
        """Mean seconds that copies to the host and to peers add to an iteration, because they slow training down."""
        return self.costs.slowed_s(self.copied_bytes, self.sent_bytes)

    def recover(self, lost: LostState) -> RecoveryCost:
        """Return the cost of a failure. Experts that the newest snapshot leaves out lose their newest updates."""
        recovery = super().recover(lost)
        tokens_lost = 0.0 if recovery.from_storage else self._tokens_lost(lost)
        return replace(recovery, tokens_lost=tokens_lost, experts_saved=self.experts_saved)

    @abstractmethod
    def _tokens_lost(self, lost: LostState) -> float:
        """Return the updates of experts that a failure loses, in iterations (:attr:`RecoveryCost.tokens_lost`)."""


class MoCCost(PartialCost):
    """Strategy that saves K experts of each layer in turn. K doubles when failures lose too many tokens.

    The code of a live job decides when K doubles (:class:`DynamicK`).

    Args:
        costs: costs of the job.
        experts_saved: K at the beginning; 0 for an eighth of the experts, the default of a live job.
        limit: share of the training's tokens that may be lost before every expert is saved; 1 keeps K constant.
        interval: iterations from one snapshot to the next.
        is_length_known: True if K depends on lost tokens as a share of all tokens of the training. False if K
            depends on their share of the tokens so far, as in a live job that does not know how long it will train.
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
        self._experts_saved = self.dynamic.first
        self.lost = 0.0
        """Updates that the failures so far have lost, in iterations, as in :attr:`RecoveryCost.tokens_lost`."""
        self._is_length_known, self._run_iterations = is_length_known, 0
        self._recovered = 0

    @property
    def experts_saved(self) -> int:
        """K, the present number of experts of each layer in a snapshot."""
        return self._experts_saved

    def fresh(self, run_iterations: int) -> MoCCost:
        """Return this strategy with the K that it has at the beginning of a training, and without lost updates."""
        strategy = MoCCost(
            self.costs, self.dynamic.first, self.dynamic.limit, self.interval, is_length_known=self._is_length_known
        )
        if self._is_length_known:
            strategy._run_iterations = run_iterations
        return strategy

    @property
    def snapshot_bytes(self) -> float:
        """Bytes of one snapshot: :attr:`experts_saved` experts of each layer, and all operators but experts."""
        return self.other_bytes + self.expert_bytes * self.experts_saved / self.experts

    @property
    def busy_s(self) -> float:
        """Seconds from the start of a snapshot until host and peers have it. Copies and sends run at the same time."""
        return max(self.costs.copy_s(self.snapshot_bytes), self.costs.send_s(self.snapshot_bytes))

    def ages(self, committed: int) -> npt.NDArray[np.float64]:
        """Return the iterations since each expert was saved, float64 ``[experts]``.

        A snapshot saves K of the E experts of a layer, so E / K snapshots save each expert once. Updates from before
        the last recovery do not count, because they are either restored or counted as lost already.
        """
        turns = math.ceil(self.experts / self.experts_saved)
        turn = np.arange(self.experts) // self.experts_saved
        newest = self._newest_snapshot(committed)
        ages = (newest // self.interval - turn) % turns * self.interval
        return np.minimum(ages, newest - self._recovered).astype(np.float64)

    def _newest_snapshot(self, committed: int) -> int:
        return committed // self.interval * self.interval

    def _tokens_lost(self, lost: LostState) -> float:
        """Return the updates that are lost, and raise K if failures have lost too many.

        Each snapshot saves K experts of a layer in turn, so the newest saved version of an expert can be several
        snapshots old. Later updates of the expert are lost. Their sum over all failures, divided by the number of
        trained iterations, is MoC-System's proportion of lost tokens (PLT).
        """
        tokens_lost = float((self.popularity * self.ages(lost.committed)).sum()) / self.layers
        self.lost += tokens_lost
        self._recovered = self._newest_snapshot(lost.committed)
        # A live job that does not know its length divides by its tokens so far.
        iterations = max(1, lost.committed, self._run_iterations)
        self._experts_saved = self.dynamic.after(self._experts_saved, self.lost / iterations)
        return tokens_lost
