"""What each way of checkpointing costs in every iteration, and what a failure costs under it.

All share one description of the job (:class:`Costs`, from a :class:`CheckpointPlan`). Rollback is that of the policy
that a live run has; how long replaying takes follows from the pipeline.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorKind
from moevement_core.policy.plan import DENSE_OVERHEAD, CheckpointPlan
from moevement_core.policy.schedule import expected_rollback
from moevement_core.policy.window import WindowKind

WEIGHT_GRADIENT_SHARE = 1 / 3
"""Of the work of a forward and a backward pass: one of three products of the same size."""


@dataclass(frozen=True)
class Costs:
    """What strategies are made of; seconds and bytes per second."""

    plan: CheckpointPlan
    storage_bytes_per_s: float
    """Of one rank to and from durable storage, all ranks at once."""
    detect_s: float
    """Until every rank knows that one is gone."""
    regroup_s: float
    """Until process groups are there again, with a spare."""
    bubble: float
    """Share of an iteration in which a stage waits: ``(S - 1) / (M + S - 1)`` for 1F1B."""

    @property
    def iteration_s(self) -> float:
        """Without any checkpointing."""
        return self.plan.given.iteration_s

    @cached_property
    def full_bytes(self) -> int:
        """A dense checkpoint of the heaviest rank."""
        return max(stage.full_bytes for stage in self.plan.stages)

    def copy_s(self, nbytes: float) -> float:
        """From device to host."""
        return nbytes / self.plan.given.cluster.d2h_bytes_per_s

    def send_s(self, nbytes: float) -> float:
        """To all peers."""
        return nbytes * self.plan.given.replicas / self.plan.given.cluster.replication_bytes_per_s

    def fetch_s(self, nbytes: float) -> float:
        """From one peer."""
        return nbytes / self.plan.given.cluster.replication_bytes_per_s

    def iterations(self, seconds: float) -> int:
        """How many begin before ``seconds`` are over."""
        return math.ceil(seconds / self.iteration_s)


@dataclass(frozen=True)
class Recovery:
    """What one failure costs, seconds by part."""

    detect_s: float
    regroup_s: float
    fetch_s: float
    replay_s: float
    replayed: int
    """Iterations."""
    tokens_lost: float = 0.0
    """Share of the tokens of an iteration, times iterations: updates that no checkpoint has."""

    @property
    def total_s(self) -> float:
        """From the failure until the job is where it was."""
        return self.detect_s + self.regroup_s + self.fetch_s + self.replay_s


class Strategy(ABC):
    """A way of checkpointing. Some change with what happens, so each training has a :meth:`fresh` one."""

    name: str

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def fresh(self) -> Strategy:
        """One for another training."""
        return self

    @property
    @abstractmethod
    def overhead_s(self) -> float:
        """What checkpointing adds to an iteration, on average."""

    @property
    @abstractmethod
    def interval(self) -> int:
        """Iterations between two states that can be returned to."""

    @abstractmethod
    def rollback(self, committed: int) -> int:
        """Iterations that are computed again if a failure comes when ``committed`` are done."""

    @property
    @abstractmethod
    def expected_rollback(self) -> float:
        """On average, at a random moment; the interrupted iteration counts half."""

    @property
    @abstractmethod
    def fetch_s(self) -> float:
        """Until state is back on the device."""

    @property
    def replay_iteration_s(self) -> float:
        """Seconds for each iteration that is computed again."""
        return self.costs.iteration_s + self.overhead_s

    def recover(self, committed: int) -> Recovery:
        """A failure when ``committed`` iterations are done; may change what the strategy does from then on."""
        replayed = min(committed, self.rollback(committed))
        return Recovery(
            self.costs.detect_s, self.costs.regroup_s, self.fetch_s, replayed * self.replay_iteration_s, replayed
        )

    def expected_recovery_s(self) -> float:
        """E[R]."""
        fixed = self.costs.detect_s + self.costs.regroup_s + self.fetch_s
        return fixed + self.expected_rollback * self.replay_iteration_s

    def analytic_ettr(self, mtbf_s: float) -> float:
        """MoEvement, section 2.4."""
        return 1 / (1 + self.overhead_s / self.costs.iteration_s) / (1 + self.expected_recovery_s() / mtbf_s)


class NoCheckpoints(Strategy):
    """Every failure starts from the beginning."""

    name = "none"
    overhead_s = 0.0
    interval = 0
    fetch_s = 0.0
    expected_rollback = math.inf

    def rollback(self, committed: int) -> int:
        """All."""
        return committed


class Dense(Strategy):
    """All state every ``interval`` iterations; every stage rolls back."""

    def __init__(self, costs: Costs, interval: int, stall_s: float, lag: int, fetch_s: float) -> None:
        super().__init__(costs)
        if interval < 1:
            raise ConfigError(f"a checkpoint every {interval} iterations; needs 1 or more")
        self._interval, self._stall_s, self.lag, self._fetch_s = interval, stall_s, lag, fetch_s

    @property
    def overhead_s(self) -> float:
        """Stalls, spread over the interval."""
        return self._stall_s / self._interval

    @property
    def interval(self) -> int:
        """As given."""
        return self._interval

    @property
    def fetch_s(self) -> float:
        """All state of a rank."""
        return self._fetch_s

    def rollback(self, committed: int) -> int:
        """To the newest checkpoint that is where it has to be."""
        there = max(0, committed - self.lag)
        return committed - there // self._interval * self._interval

    @property
    def expected_rollback(self) -> float:
        """Half the interval (MoEvement, section 2.4), and the lag."""
        return self._interval / 2 + self.lag


class DenseSynchronous(Dense):
    """Training stops while all state is written to storage; the interval is Young's and Daly's unless given."""

    name = "dense"

    def __init__(self, costs: Costs, mtbf_s: float, interval: int | None = None) -> None:
        write_s = costs.full_bytes / costs.storage_bytes_per_s
        super().__init__(costs, interval or _young_daly(costs, write_s, mtbf_s), write_s, 0, write_s)


class CheckFreq(Dense):
    """Snapshot beside the next iteration, persisted in the background; at most 3% of overhead (its policy's cap)."""

    name = "checkfreq"

    def __init__(self, costs: Costs) -> None:
        copy_s, write_s = costs.copy_s(costs.full_bytes), costs.full_bytes / costs.storage_bytes_per_s
        stall_s = max(0.0, copy_s - costs.iteration_s)
        hidden = math.ceil(stall_s / (DENSE_OVERHEAD * costs.iteration_s))
        interval = max(1, hidden, costs.iterations(max(copy_s, write_s)))
        super().__init__(costs, interval, stall_s, costs.iterations(copy_s + write_s), write_s)


class Gemini(Dense):
    """All state in peers' memory, at the interval that is best for the failure rate (an oracle), or Young's."""

    name = "gemini"

    def __init__(self, costs: Costs, mtbf_s: float, *, is_oracle: bool = True) -> None:
        copy_s, send_s = costs.copy_s(costs.full_bytes), costs.send_s(costs.full_bytes)
        busy_s = max(copy_s, send_s)
        stall_s, lag = max(0.0, busy_s - costs.iteration_s), costs.iterations(busy_s)

        def with_interval(interval: int) -> Dense:
            return Dense(costs, interval, stall_s, lag, costs.fetch_s(costs.full_bytes))

        if is_oracle:
            longest = max(2, int(4 * math.sqrt(2 * max(stall_s, 1e-3) * mtbf_s) / costs.iteration_s))
            interval = max(range(1, longest + 1), key=lambda one: with_interval(one).analytic_ettr(mtbf_s))
        else:
            interval = _young_daly(costs, stall_s, mtbf_s)
            self.name = "gemini-young-daly"
        super().__init__(costs, interval, stall_s, lag, costs.fetch_s(costs.full_bytes))


def _young_daly(costs: Costs, write_s: float, mtbf_s: float) -> int:
    """``sqrt(2 C MTBF)``, iterations."""
    return max(1, round(math.sqrt(2 * write_s * mtbf_s) / costs.iteration_s))


@dataclass
class TokenLoss:
    """MoC-System's budget: the share of updates that a training may lose, and what follows when it is used up."""

    threshold: float = 0.0375
    """Of all tokens (its section 3): beyond it more experts are saved in each iteration."""
    lost: float = field(default=0.0, init=False)


class MoC(Strategy):
    """K experts of each layer in every iteration, the others' newest updates are lost; K doubles with the loss."""

    name = "moc"

    def __init__(self, costs: Costs, experts_saved: int = 1, budget: TokenLoss | None = None) -> None:
        super().__init__(costs)
        stage = max(costs.plan.stages, key=lambda one: one.full_bytes)
        pairs = list(zip(stage.shape.operators, stage.table.full[0].tolist(), strict=True))
        self._expert_bytes = sum(size for one, size in pairs if one.kind is OperatorKind.EXPERT)
        self._other_bytes = sum(size for one, size in pairs if one.kind is not OperatorKind.EXPERT)
        layers = max(1, sum(one.kind is OperatorKind.GATE for one, _ in pairs))
        of_rank = sum(one.kind is OperatorKind.EXPERT for one, _ in pairs) / layers
        self.experts = max(1, round(of_rank * costs.plan.given.job.expert_parallel))
        """Of a layer, on all ranks that share it."""
        self.experts_saved = self._first_saved = min(experts_saved, self.experts)
        self.budget = budget or TokenLoss()

    def fresh(self) -> Strategy:
        """Nothing lost yet."""
        return MoC(self.costs, self._first_saved, TokenLoss(self.budget.threshold))

    @property
    def overhead_s(self) -> float:
        """What does not hide behind one iteration."""
        nbytes = self._other_bytes + self._expert_bytes * self.experts_saved / self.experts
        return max(0.0, max(self.costs.copy_s(nbytes), self.costs.send_s(nbytes)) - self.costs.iteration_s)

    interval = 1
    expected_rollback = 1.5

    @property
    def fetch_s(self) -> float:
        """All state of a rank, from a peer."""
        return self.costs.fetch_s(self.costs.full_bytes)

    def rollback(self, committed: int) -> int:
        """The interrupted iteration, and the one that was being copied."""
        return 1

    def recover(self, committed: int) -> Recovery:
        """Experts come back as they were up to E / K iterations ago; those updates are lost."""
        made = super().recover(committed)
        lost = min(committed, (self.experts / self.experts_saved - 1) / 2) * self._expert_bytes / self.costs.full_bytes
        self.budget.lost += lost
        if committed and self.budget.lost / committed > self.budget.threshold:
            self.experts_saved = min(self.experts, 2 * self.experts_saved)
        return replace(made, tokens_lost=lost)


class MoEvement(Strategy):
    """A slice of the state in every iteration (section 3), and recovery of the stage that lost it.

    Args:
        costs: of the job.
        is_local: whether only one stage replays, from logs (section 3.4); otherwise all do.
        skips_frozen: whether frozen operators compute no weight gradients in a replay (section 3.3).
        name: how it is called.
    """

    def __init__(
        self, costs: Costs, *, is_local: bool = True, skips_frozen: bool = True, name: str = "moevement"
    ) -> None:
        super().__init__(costs)
        self.name, self._is_local, self._skips_frozen = name, is_local, skips_frozen

    @cached_property
    def overhead_s(self) -> float:
        """Stalls of the plan, and what replication falls behind in a window."""
        return self.costs.plan.stall_s + self.costs.plan.behind_s / self.costs.plan.size

    interval = 1

    @cached_property
    def fetch_s(self) -> float:
        """All slots of a window, of one rank."""
        plan = self.costs.plan
        return self.costs.fetch_s(max(int(stage.window.slot_bytes[0].sum()) for stage in plan.stages))

    def rollback(self, committed: int) -> int:
        """The window that is on all peers, and what came after it."""
        size, lag = self.costs.plan.size, self._lag
        return lag + size + ((committed - lag) % size if self.costs.plan.given.kind is WindowKind.ALIGNED else 0)

    @cached_property
    def _lag(self) -> int:
        return self.costs.plan.lag

    @property
    def expected_rollback(self) -> float:
        """Of the policy, as a live run has it."""
        plan = self.costs.plan
        return expected_rollback(plan.given.kind, plan.size, plan.lag)

    @cached_property
    def frozen_share(self) -> float:
        """Of the weights of a rank, on average over the iterations that make a dense state of a window."""
        stage = self.costs.plan.binding_stage
        full, active, shares = stage.table.full[0], 0.0, []
        first = 0
        for end in stage.window.ends:
            active += float(full[stage.order[first:end]].sum())
            first = end
            shares.append(1 - active / float(full.sum()))
        return sum(shares) / len(shares)

    @cached_property
    def replay_iteration_s(self) -> float:
        """Without the bubble where one stage replays alone, without weight gradients where operators are frozen."""
        seconds = self.costs.iteration_s * (1 - self.costs.bubble if self._is_local else 1.0)
        if self._skips_frozen:
            converting = self.costs.plan.size / max(self.expected_rollback, self.costs.plan.size)
            seconds *= 1 - WEIGHT_GRADIENT_SHARE * self.frozen_share * converting
        return seconds


STRATEGIES: dict[str, Callable[[Costs, float], Strategy]] = {
    "none": lambda costs, mtbf_s: NoCheckpoints(costs),
    "dense": DenseSynchronous,
    "checkfreq": lambda costs, mtbf_s: CheckFreq(costs),
    "gemini": Gemini,
    "gemini-young-daly": lambda costs, mtbf_s: Gemini(costs, mtbf_s, is_oracle=False),
    "moc": lambda costs, mtbf_s: MoC(costs),
    "moevement": lambda costs, mtbf_s: MoEvement(costs),
    "moevement-all-stages": lambda costs, mtbf_s: MoEvement(costs, is_local=False, name="moevement-all-stages"),
    "moevement-all-gradients": lambda costs, mtbf_s: MoEvement(
        costs, skips_frozen=False, name="moevement-all-gradients"
    ),
}
"""By name, for a job and its mean time between failures."""
