"""What to choose for a job on its cluster at a failure rate, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moevement_core.checkpoint_plan import CheckpointPlan
from moevement_core.errors import WindowError
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.strategies import STRATEGIES, CheckFreq, Costs, DenseSynchronous, Gemini, MoEvement
from moevement_core.simulator.strategies.base import Strategy

MOST_REPLICAS = 3
WINDOWS_TRIED = 4
"""From the smallest that fits on."""
MONTH_S = 30 * 86400.0
TOLERATED = 0.01
"""Losses of all copies in a month that are not worth another replica."""
LOSSY = ("moc", "moetion")


@dataclass(frozen=True)
class Choice:
    """One way to configure checkpointing."""

    strategy: Strategy
    replicas: int
    lost_a_month: float
    """Failures in 30 days after which no copy in memory is left, if failures of nodes are independent but for those
    that come together."""
    fits: bool
    """Whether a node has the host memory."""

    def ettr(self, mtbf_s: float) -> float:
        """By the formula; recoveries from storage included, and starting from it."""
        costs, lost = self.strategy.costs, self.lost_a_month / MONTH_S
        beyond_s = costs.store_s() + costs.iterations(costs.store_s()) * 1.5 * costs.iteration_s
        return self.strategy.analytic_ettr(mtbf_s) / (1 + lost * beyond_s)

    @property
    def window(self) -> int | None:
        """W, of strategies that have one."""
        return self.strategy.costs.plan.size if isinstance(self.strategy, MoEvement) else None

    @property
    def flags(self) -> str:
        """Of a run with it."""
        if isinstance(self.strategy, MoEvement):
            kind = self.strategy.costs.plan.given.kind
            return (
                f"--moevement-sparse-ckpt --moevement-window {self.window} --moevement-window-kind {kind} "
                f"--moevement-replicas {self.replicas}"
            )
        return f"{self.strategy.name}, every {self.strategy.interval} iterations"


@dataclass(frozen=True)
class Advice:
    """The best that loses no update, and what else was looked at, the best of each first."""

    mtbf_s: float
    best: Choice
    sparse: Choice
    """The best of sparse checkpoints; mostly the same."""
    others: tuple[Choice, ...]
    lossy: tuple[Strategy, ...]


def advise(costs: Costs, mtbf_s: float, together: float = 0.0) -> Advice:
    """Try windows, window kinds, replicas and strategies.

    Args:
        costs: of the job.
        mtbf_s: mean time between failures of the job.
        together: probability that a failing node takes the next one along.
    """
    choices = sorted(_choices(costs, mtbf_s, together), key=lambda one: (one.fits, one.ettr(mtbf_s)), reverse=True)
    first: dict[str, Choice] = {}
    for one in choices:
        first.setdefault(one.strategy.name, one)
    best = choices[0]
    others = tuple(one for name, one in first.items() if name != best.strategy.name)
    sparse = next(one for one in choices if one.window is not None)
    return Advice(mtbf_s, best, sparse, others, tuple(STRATEGIES[name](costs, mtbf_s) for name in LOSSY))


def _choices(costs: Costs, mtbf_s: float, together: float) -> Iterator[Choice]:
    nodes, given = costs.nodes, costs.plan.given
    for replicas in range(1, min(MOST_REPLICAS, max(1, nodes - 1)) + 1):
        for kind in WindowKind:
            smallest = _with(costs, replicas=replicas, kind=kind, window=None)
            if smallest is None:
                continue
            for window in range(smallest.plan.size, smallest.plan.size + WINDOWS_TRIED):
                one = _with(costs, replicas=replicas, kind=kind, window=window)
                if one is not None:
                    strategy = MoEvement(one, name=f"moevement-{kind}")
                    yield _choice(strategy, replicas, mtbf_s, together, one.plan.host_memory_of_node)
        made = _with(costs, replicas=replicas, kind=given.kind, window=None)
        if made is not None:
            gemini = Gemini(made, mtbf_s)
            yield _choice(gemini, replicas, mtbf_s, together, gemini.host_bytes * given.cluster.gpus_per_node)
    for stored in (CheckFreq(costs), DenseSynchronous(costs, mtbf_s)):
        yield Choice(stored, 0, 0.0, fits=True)


def _with(costs: Costs, *, replicas: int, kind: WindowKind, window: int | None) -> Costs | None:
    """The same job otherwise saved; None if its nodes are too few."""
    try:
        return replace(
            costs, plan=CheckpointPlan(replace(costs.plan.given, replicas=replicas, kind=kind, window=window))
        )
    except WindowError:
        return None


def _choice(strategy: Strategy, replicas: int, mtbf_s: float, together: float, node_bytes: float) -> Choice:
    """All copies are gone if the node's next ``replicas`` nodes fail with it, or before state is whole again."""
    costs = strategy.costs
    whole_again_s = strategy.expected_recovery_s() + strategy.interval * costs.iteration_s
    # A node of the job fails once in nodes x MTBF.
    before = min(1.0, whole_again_s / (mtbf_s * costs.nodes))
    lost = MONTH_S / mtbf_s * min(1.0, together + before) ** replicas
    memory = costs.plan.given.cluster.host_memory_bytes
    return Choice(strategy, replicas, lost, memory is None or node_bytes <= memory)


def reasons(choice: Choice, mtbf_s: float) -> Iterator[str]:
    """Why it is what it is, a sentence each."""
    strategy, costs = choice.strategy, choice.strategy.costs
    yield (
        f"{strategy.overhead_s / costs.iteration_s:.1%} of overhead; a failure costs "
        f"{strategy.expected_recovery_s():.0f} s: {costs.detect_s + costs.regroup_s:.0f} s to notice and regroup, "
        f"{strategy.fetch_s:.1f} s to fetch, {strategy.expected_rollback:.1f} iterations computed again"
    )
    if choice.window is not None:
        plan = costs.plan
        stage = plan.binding_stage
        smallest = max(one.own.size for one in plan.stages)
        yield (
            f"W = {choice.window}: {stage.budget.binding} carries {stage.budget.bytes / 1e9:.3g} GB in an iteration, "
            f"and {smallest} is the smallest window whose slots fit"
            + ("" if choice.window == smallest else "; a larger one stalls less or replays no more")
        )
        other = WindowKind.ROLLING if plan.given.kind is WindowKind.ALIGNED else WindowKind.ALIGNED
        alternative = _with(costs, replicas=choice.replicas, kind=other, window=None)
        if alternative is not None:
            changed = MoEvement(alternative)
            yield (
                f"{plan.given.kind} windows roll back {strategy.expected_rollback:.1f} iterations, {other} ones "
                f"(W = {alternative.plan.size}) {changed.expected_rollback:.1f}"
            )
    if choice.replicas:
        yield (
            f"{choice.replicas} replica{'s' if choice.replicas > 1 else ''}: {choice.lost_a_month:.2g} failures in 30 "
            "days leave no copy in memory"
            + ("" if choice.lost_a_month <= TOLERATED else ", so keep windows on storage too (--moevement-persist-dir)")
        )
    if not choice.fits:
        yield "no way of keeping state in memory fits into the host memory of a node"
