"""Advice on the strategy for a job on its cluster: it compares the best settings of all exact strategies.

An exact strategy loses no update. A candidate is an exact strategy with one window or interval. The formula for the
ETTR (MoEvement, section 2.4) ranks the candidates of each strategy. The best few candidates are then simulated, with
the same failures and spares as the results table of ``moevement simulate``. Rows of this table take part as candidates
if a job can be started with them. The candidate with the best simulated ETTR wins, but candidates that fit into host
memory come before all others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moevement_core.errors import WindowError
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.policy.window import WindowKind
from moevement_core.simulator.costs import (
    CheckFreqCost,
    Costs,
    DenseSynchronousCost,
    GeminiCost,
    MoEvementCost,
    RedoCost,
    Techniques,
)
from moevement_core.simulator.costs.strategy_cost import StrategyCost
from moevement_core.simulator.experiment import Cell, Draws, cell_of, half_interval
from moevement_core.simulator.training import Spares
from moevement_core.strategies.config import RecoveryKind

MOST_COPIES = 3
WINDOWS_TRIED = 4
"""Number of window sizes W to try: the smallest W with which copies keep up with training, and the next larger ones."""
SIMULATED = 3
"""Number of candidates to simulate for each strategy: those with the best ETTR by the formula."""
SCALES = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
"""Factors to try: each multiplies the interval between checkpoints that the strategy itself would choose."""
MONTH_S = 30 * 86400.0
LOSSY = ("moc", "moetion")
"""Names of strategies that lose updates of experts."""


@dataclass(frozen=True)
class Fixed:
    """Window settings that the user has decided, so that advice does not choose them."""

    kind: WindowKind | None = None
    window: int | None = None

    def allows(self, strategy: StrategyCost) -> bool:
        """Return True if a strategy agrees with these settings."""
        inputs, size = strategy.costs.plan.inputs, strategy.costs.plan.size
        if not isinstance(strategy, MoEvementCost):
            return True
        has_kind = self.kind is None or isinstance(strategy, RedoCost) or inputs.kind is self.kind
        return has_kind and self.window in (None, size)


@dataclass(frozen=True)
class Choice:
    """Candidate with the results of its simulated trainings."""

    cell: Cell

    @property
    def strategy(self) -> StrategyCost:
        """Strategy of the candidate, with its window or interval."""
        return self.cell.strategy

    @property
    def ettr(self) -> float:
        """Effective training time ratio, a mean over the simulated trainings."""
        return self.cell.ettr

    @property
    def is_sparse(self) -> bool:
        """True if the strategy saves a part of the state in every iteration."""
        return isinstance(self.strategy, MoEvementCost)

    @property
    def copies(self) -> int:
        """Number of peers that keep a copy of a rank's state; 0 if the state is in storage."""
        return self.strategy.costs.plan.inputs.replicas if self.strategy.in_memory else 0

    @property
    def fits(self) -> bool:
        """True if a node has enough host memory for the strategy, or if the node's memory is not known."""
        return fits(self.strategy)

    @property
    def lost_a_month(self) -> float:
        """Expected number of times in 30 days that a failure leaves no copy of some rank's state in memory.

        This happens if a rank's node fails, and each node that keeps the rank's copies fails too: together with the
        rank's node, or before new copies are complete. The property assumes that new copies are complete one checkpoint
        interval after the recovery, and that the recovery takes the mean time of the simulated recoveries. This time
        includes waits for spares.
        """
        if not self.strategy.in_memory:
            return 0.0
        costs, mtbf_s = self.strategy.costs, self.cell.mtbf_s
        if not math.isfinite(mtbf_s):
            return 0.0
        failures = sum(outcome.failures for outcome in self.cell.outcomes)
        spent_s = sum(
            outcome.lost_s[part]
            for outcome in self.cell.outcomes
            for part in ("detect", "no spare", "regroup", "fetch", "convert", "catch up")
        )
        recovery_s = spent_s / failures if failures else self.strategy.expected_recovery_s()
        whole_again_s = recovery_s + self.strategy.interval * costs.iteration_s
        # A given node of the job fails once in nodes x MTBF.
        before = min(1.0, whole_again_s / (mtbf_s * costs.plan.inputs.nodes))
        return MONTH_S / mtbf_s * min(1.0, self.cell.together + before) ** self.copies

    @property
    def flags(self) -> str:
        """Command-line flags of a run with this choice."""
        strategy, plan = self.strategy, self.strategy.costs.plan
        if isinstance(strategy, MoEvementCost):
            recovery = " --moevement-recovery redo" if isinstance(strategy, RedoCost) else ""
            return (
                f"--moevement-sparse-ckpt --moevement-window {plan.size} --moevement-window-kind {plan.inputs.kind} "
                f"--moevement-replicas {self.copies}{recovery}"
            )
        if isinstance(strategy, GeminiCost):
            return (
                f"--moevement-strategy gemini --moevement-dense-interval {strategy.interval} "
                f"--moevement-replicas {self.copies}"
            )
        if isinstance(strategy, CheckFreqCost):
            return f"--moevement-strategy checkfreq --moevement-dense-interval {strategy.interval}"
        return f"--save-interval {strategy.interval}"


@dataclass(frozen=True)
class Advice:
    """Best choice at one failure rate, and the choices that it was compared with."""

    mtbf_s: float
    choices: tuple[Choice, ...]
    """Best choice of each exact strategy, the best first; choices that do not fit into host memory come last."""
    by_copies: tuple[Choice, ...]
    """Best choices that keep state in the memory of peers: one for each number of copies, beginning with the fewest."""

    @property
    def best(self) -> Choice:
        """Choice that the advice proposes."""
        return self.choices[0]

    @property
    def next_best(self) -> Choice | None:
        """Best choice that has another strategy than :attr:`best`; None if no other strategy was tried."""
        return self.choices[1] if len(self.choices) > 1 else None

    @property
    def gain(self) -> tuple[float, float]:
        """ETTR of the best choice minus that of the next best, and half of the difference's 95% confidence interval.

        The difference is a mean over pairs of trainings with the same failures.
        """
        if self.next_best is None:
            return 0.0, math.nan
        pairs = zip(self.best.cell.outcomes, self.next_best.cell.outcomes, strict=True)
        gains = [best.ettr - other.ettr for best, other in pairs]
        return statistics.fmean(gains), half_interval(gains)

    @property
    def decides(self) -> tuple[str, float, float] | None:
        """Cause of lost time, such as ``catch up``, to which the best choice loses less than the next best choice does.

        It is the cause with the largest difference. The tuple has the name of the cause, and the shares of wall time
        that the best choice and the next best choice lose to it. None if no other strategy was tried.
        """
        if self.next_best is None:
            return None
        best, other = self.best.cell.lost, self.next_best.cell.lost
        name = max(best, key=lambda part: other[part] - best[part])
        return name, best[name], other[name]


def fits(strategy: StrategyCost) -> bool:
    """Return True if a node has enough host memory for a strategy, or if the node's memory is not known."""
    memory = strategy.costs.plan.inputs.cluster.host_memory_bytes
    return memory is None or node_bytes(strategy) <= memory


def node_bytes(strategy: StrategyCost) -> float:
    """Return the bytes of host memory that a strategy takes on a node."""
    return strategy.host_bytes * strategy.costs.plan.inputs.ranks_of_node


class Variants:
    """Costs of variants of a job, which differ in windows, number of copies or method of recovery.

    The object plans each variant once, and remembers its costs.

    Args:
        costs: costs of the job with the settings of the user.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._known: dict[tuple[object, ...], Costs | None] = {}

    def of(
        self, kind: WindowKind, window: int | None = None, copies: int | None = None, *, is_redone: bool = False
    ) -> Costs | None:
        """Return the costs of a variant; None if there are too few nodes for the copies or too few operators for W.

        Args:
            kind: kind of the windows.
            window: W in iterations; None for the smallest W with which copies keep up with training.
            copies: number of copies on other nodes; None for the number in the job's plan.
            is_redone: True if the job recovers by redo; False if it recovers by replay.
        """
        copies = self.costs.plan.inputs.replicas if copies is None else copies
        key = (kind, window, copies, is_redone)
        if key not in self._known:
            recovery = RecoveryKind.REDO if is_redone else RecoveryKind.REPLAY
            inputs = replace(self.costs.plan.inputs, kind=kind, window=window, replicas=copies, recovery=recovery)
            try:
                self._known[key] = replace(self.costs, plan=CheckpointPlan(inputs))
            except WindowError:
                self._known[key] = None
        return self._known[key]


def advise(
    variants: Variants, draws: Draws, until_s: float, spares: Spares, rows: Sequence[Cell] = (),
    fixed: Fixed | None = None,
) -> Advice:  # fmt: skip
    """Find the best settings of every exact strategy, and compare all strategies under the same failures.

    Args:
        variants: variants of the job. The proposed choice has as many copies as the job's plan; other numbers of copies
            are only compared (:attr:`Advice.by_copies`).
        draws: failures of each training.
        until_s: wall seconds of a training.
        spares: spare nodes of a training.
        rows: rows of the results table at this failure rate. They are candidates that need no further simulation.
        fixed: window settings that the user has decided.
    """
    costs = variants.costs
    copies = costs.plan.inputs.replicas
    choices = choices_of(variants, draws, until_s=until_s, spares=spares, rows=rows, fixed=fixed)
    by_copies = {copies: choices}
    for count in range(1, min(MOST_COPIES, max(1, costs.plan.inputs.nodes - 1)) + 1):
        if count != copies and variants.of(costs.plan.inputs.kind, copies=count) is not None:
            by_copies[count] = choices_of(
                variants, draws, until_s=until_s, spares=spares, rows=(), fixed=fixed, copies=count
            )
    in_memory = (
        next(choice for choice in by_copies[count] if choice.strategy.in_memory) for count in sorted(by_copies)
    )
    return Advice(draws.mtbf_s, tuple(choices), tuple(in_memory))


def choices_of(
    variants: Variants, draws: Draws, until_s: float, spares: Spares, rows: Sequence[Cell] = (),
    fixed: Fixed | None = None, copies: int | None = None,
) -> list[Choice]:  # fmt: skip
    """Return the best choice of each exact strategy, the best first.

    Args:
        variants: variants of the job.
        draws: failures of each training.
        until_s: wall seconds of a training.
        spares: spare nodes of a training.
        rows: candidates that have been simulated already.
        fixed: window settings that the user has decided.
        copies: number of copies on other nodes; None for the number in the job's plan.
    """
    fixed = fixed or Fixed()
    copies = variants.costs.plan.inputs.replicas if copies is None else copies
    known = [Choice(cell) for cell in rows if is_candidate(cell.strategy) and fixed.allows(cell.strategy)]
    for candidates in _by_family(_candidates(variants, draws.mtbf_s, fixed, copies)).values():
        candidates.sort(key=lambda candidate: (fits(candidate), candidate.analytic_ettr(draws.mtbf_s)), reverse=True)
        known += [Choice(cell_of(candidate, draws, until_s, spares)) for candidate in candidates[:SIMULATED]]
    known.sort(key=_rank, reverse=True)
    best: dict[str, Choice] = {}
    for choice in known:
        best.setdefault(family(choice.strategy), choice)
    return list(best.values())


def _by_family(candidates: Iterable[StrategyCost]) -> dict[str, list[StrategyCost]]:
    families: dict[str, list[StrategyCost]] = {}
    for candidate in candidates:
        families.setdefault(family(candidate), []).append(candidate)
    return families


def _rank(choice: Choice) -> tuple[bool, float, float]:
    """Return the sort key of a choice: True if it fits into host memory, simulated ETTR, and ETTR by the formula."""
    return choice.fits, choice.ettr, choice.cell.formula


def is_candidate(strategy: StrategyCost) -> bool:
    """Return True if a strategy loses no update, and ``moevement launch`` can start a job with it."""
    is_part = isinstance(strategy, MoEvementCost) and strategy.techniques != Techniques()
    return strategy.name not in (*LOSSY, "none", "gemini-stalling") and not is_part


def family(strategy: StrategyCost) -> str:
    """Return the name of a strategy without its variant, such as ``gemini`` for ``gemini-young-daly``."""
    if isinstance(strategy, RedoCost):
        return "redo"
    return "moevement" if isinstance(strategy, MoEvementCost) else strategy.name.split("-")[0]


def _candidates(variants: Variants, mtbf_s: float, fixed: Fixed, copies: int) -> Iterator[StrategyCost]:
    """Yield the candidates: each exact strategy with each of the windows or intervals to try."""
    for kind in WindowKind if fixed.kind is None else (fixed.kind,):
        smallest = variants.of(kind, None, copies)
        for variant in _windows(smallest, variants, kind=kind, fixed=fixed.window, copies=copies):
            yield MoEvementCost(variant, name=f"moevement-{kind}")
    smallest = variants.of(WindowKind.ROLLING, None, copies, is_redone=True)
    for variant in _windows(smallest, variants, kind=WindowKind.ROLLING, fixed=fixed.window, copies=copies):
        yield RedoCost(variant)
    costs = variants.of(variants.costs.plan.inputs.kind, variants.costs.plan.inputs.window, copies)
    if costs is None:
        return
    # Training waits for a checkpoint that is still being sent when the next one begins; this interval avoids that.
    sent = costs.iterations(max(costs.copy_s(costs.full_bytes), costs.send_s(costs.full_bytes)))
    for interval in _intervals(GeminiCost(costs, mtbf_s).interval) | {max(1, sent)}:
        yield GeminiCost(costs, mtbf_s, interval=interval)
    written = costs.iterations(max(costs.copy_s(costs.full_bytes), costs.store_s()))
    for interval in _intervals(CheckFreqCost(costs).interval):
        yield CheckFreqCost(costs, interval=max(interval, written))
    for interval in _intervals(DenseSynchronousCost(costs, mtbf_s).interval):
        yield DenseSynchronousCost(costs, mtbf_s, interval=interval)


def _windows(
    smallest: Costs | None, variants: Variants, kind: WindowKind, fixed: int | None, copies: int
) -> Iterator[Costs]:
    """Yield the job's costs with each W to try: the user's W, or else the smallest W and the next larger ones.

    Args:
        smallest: costs with the smallest W with which copies keep up; None if the job has too few nodes.
        variants: variants of the job.
        kind: kind of the windows.
        fixed: W that the user has decided; None if the user has not.
        copies: number of copies on other nodes.
    """
    if smallest is None:
        return
    first = smallest.plan.size
    for window in range(first, first + WINDOWS_TRIED) if fixed is None else (fixed,):
        variant = variants.of(kind, window, copies)
        if variant is not None:
            yield variant


def _intervals(own: int) -> set[int]:
    return {max(1, round(own * scale)) for scale in SCALES}
