"""Base of all simulated strategies, and the cost of a failure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from moevement_core.planning.checkpoint_plan import INTERRUPTED
from moevement_core.simulator.costs.costs import Costs


@dataclass(frozen=True)
class LostState:
    """State that a training lost since its last complete recovery."""

    committed: int
    """Number of committed iterations at the newest failure."""
    into: float
    """Share of the next iteration that was executed before the failure, 0 to 1."""
    nodes: Collection[int]
    """Nodes on which something failed: the whole node, or a process."""
    hosts: Collection[int]
    """Nodes among ``nodes`` that lost their host memory, because the whole node failed."""


@dataclass(frozen=True)
class RecoveryCost:
    """Cost of one failure: the seconds of each part of the recovery, and the updates of experts that are lost."""

    detect_s: float
    regroup_s: float
    fetch_s: float
    convert_s: float
    """Seconds to replay the first iterations, until all operators are active."""
    catch_up_s: float
    """Seconds to replay the iterations after those of ``convert_s``, up to the failure."""
    replayed: int
    """Number of replayed iterations."""
    tokens_lost: float = 0.0
    """Updates of experts that no checkpoint has, so that they are lost, counted in iterations. If all experts
    lose an iteration, it counts as 1. If one expert loses an iteration, it counts as the expert's share of tokens."""
    from_storage: bool = False
    """True if some rank's state had no copy left in memory, so that the job restored from storage."""
    experts_saved: int | None = None
    """Number of experts of each layer in a snapshot after the recovery; None for a strategy that saves all experts."""

    @property
    def total_s(self) -> float:
        """Seconds from the failure until the job has the state again that it had at the failure."""
        return self.detect_s + self.regroup_s + self.fetch_s + self.convert_s + self.catch_up_s


class StrategyCost(ABC):
    """Simulated way of checkpointing. By default there is a restore point every :attr:`interval` iterations.

    Failures may change what a strategy saves, so each training gets a :meth:`fresh` strategy.
    """

    name: str
    in_memory = True
    """True if peers keep the state in host memory. If a rank and all its peers fail, the job restores from storage."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def fresh(self, run_iterations: int) -> StrategyCost:
        """Return this strategy in its initial state, for a training of ``run_iterations`` iterations."""
        return self

    @property
    @abstractmethod
    def overhead_s(self) -> float:
        """Mean seconds that checkpointing adds to an iteration."""

    @property
    @abstractmethod
    def interval(self) -> int:
        """Iterations from one restore point to the next."""

    @property
    @abstractmethod
    def copied_bytes(self) -> float:
        """Mean bytes that the heaviest rank copies from device to host in an iteration."""

    @property
    def sent_bytes(self) -> float:
        """Mean bytes that the heaviest rank sends to each of its peers in an iteration."""
        return 0.0

    @property
    @abstractmethod
    def host_bytes(self) -> float:
        """Bytes of host memory for the heaviest rank: its own snapshots, copies for other ranks, and logs."""

    @property
    @abstractmethod
    def arrival(self) -> float:
        """Iterations from the commit of an iteration until its state is complete at peers or in storage."""

    def rollback(self, committed: int, into: float) -> int:
        """Return the number of committed iterations that are executed again after a failure.

        Args:
            committed: number of committed iterations.
            into: share of the next iteration that was executed before the failure, 0 to 1.
        """
        return committed - max(0, self._newest(committed, into)) // self.interval * self.interval

    def _newest(self, committed: int, into: float) -> int:
        """Return the newest iteration whose state is complete at peers or in storage."""
        return math.floor(committed + into - self.arrival)

    @property
    def expected_rollback(self) -> float:
        """Mean rollback in iterations for a failure at a random moment. The interrupted iteration counts as half.

        It is half of the interval (MoEvement, section 2.4), plus :attr:`arrival`.
        """
        return self.interval / 2 + self.arrival

    @property
    @abstractmethod
    def fetch_s(self) -> float:
        """Seconds to load the state of a rank back to its device."""

    @property
    def _local_fetch_s(self) -> float:
        """Seconds to load the state of a rank from its own host's memory, which survives if only the process failed."""
        return self.fetch_s

    def replay_iteration_s(self, nodes: Collection[int]) -> float:
        """Return the seconds of a replayed iteration after a failure of ``nodes``, once all operators are active."""
        return self.costs.iteration_s + self.overhead_s

    def _replay_s(self, nodes: Collection[int], iterations: float) -> tuple[float, float]:
        """Return the seconds of a replay: with some operators frozen, and once all operators are active.

        Args:
            nodes: nodes on which something failed.
            iterations: number of iterations to replay.
        """
        return 0.0, iterations * self.replay_iteration_s(nodes)

    def recover(self, lost: LostState) -> RecoveryCost:
        """Return the cost of a failure. Some strategies also change what they save after the failure."""
        if self.in_memory and not self._survives(lost.hosts):
            return self._from_storage(lost.committed)
        replayed = min(lost.committed, self.rollback(lost.committed, lost.into))
        convert_s, catch_up_s = self._replay_s(lost.nodes, replayed)
        is_local = not lost.hosts and self.costs.plan.inputs.keeps_own_copies
        return RecoveryCost(
            detect_s=self.costs.detect_s, regroup_s=self.costs.regroup_s,
            fetch_s=self._local_fetch_s if is_local else self.fetch_s,
            convert_s=convert_s, catch_up_s=catch_up_s, replayed=replayed,
        )  # fmt: skip

    def _survives(self, hosts: Collection[int]) -> bool:
        """Return True if host memory of other nodes still holds the state of every rank on ``hosts``."""
        return self.costs.placement.copies_survive(hosts)

    def _from_storage(self, committed: int) -> RecoveryCost:
        """Return the cost of a recovery from storage.

        While the job trains, ranks write windows or checkpoints to storage, each as soon as the one before is complete.
        A recovery loads the newest complete window or checkpoint.
        """
        every = max(1, self.costs.iterations(self.costs.store_s()))
        replayed = min(committed, committed - max(0, committed // every - 1) * every)
        seconds = replayed * (self.costs.iteration_s + self.overhead_s)
        return RecoveryCost(
            detect_s=self.costs.detect_s,
            regroup_s=self.costs.regroup_s,
            fetch_s=self.costs.store_s(),
            convert_s=0.0,
            catch_up_s=seconds,
            replayed=replayed,
            from_storage=True,
        )

    def expected_recovery_s(self) -> float:
        """Return E[R], the expected seconds of a recovery from the loss of one node."""
        if not math.isfinite(self.expected_rollback):
            return math.inf
        fixed = self.costs.detect_s + self.costs.regroup_s + self.fetch_s
        # All stages execute the interrupted iteration again. On average, half of it was done at the failure.
        interrupted_s = INTERRUPTED * (self.costs.iteration_s + self.overhead_s)
        convert_s, catch_up_s = self._replay_s((0,), max(0.0, self.expected_rollback - INTERRUPTED))
        return fixed + interrupted_s + convert_s + catch_up_s

    def analytic_ettr(self, mtbf_s: float) -> float:
        """Return the effective training time ratio by the formula of MoEvement, section 2.4."""
        return 1 / (1 + self.overhead_s / self.costs.iteration_s) / (1 + self.expected_recovery_s() / mtbf_s)
