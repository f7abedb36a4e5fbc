"""Simulation of a training that goes from one failure to the next. Hours of training take milliseconds to simulate."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moevement_core.simulator.costs import LostState, StrategyCost
from moevement_core.simulator.failures import Failure


@dataclass(frozen=True)
class Spares:
    """Spare nodes that replace failed nodes."""

    count: int | None = None
    """Number of spare nodes; None: as many as needed."""
    repair_s: float = math.inf
    """Seconds from a node's failure until it is repaired and serves as a spare."""
    provided_s: float = math.inf
    """Seconds that the cluster's scheduler needs to provide another node when no spare is free."""


@dataclass(frozen=True)
class UpdatesLost:
    """Updates that a training has lost up to one of its failures, and how many experts it saves from then on."""

    at_s: float
    """Wall seconds of the failure."""
    experts_saved: int
    """Number of experts of each layer in a snapshot after the failure, K."""
    lost: float
    """Lost updates in iterations, as in :attr:`RecoveryCost.tokens_lost`, of this failure and all earlier ones."""
    of_run: float
    """Proportion of lost tokens (PLT of MoC-System, equation 7).

    It is ``lost`` divided by the iterations that the whole training would have without checkpoints and failures.
    """
    so_far: float
    """``lost`` divided by the iterations that are committed at the failure."""


@dataclass
class TrainingOutcome:
    """Result of a simulated training."""

    wall_s: float
    iterations: int
    iteration_s: float
    """Seconds of an iteration without checkpointing and failures."""
    failures: int = 0
    during_recovery: int = 0
    """Number of failures during the recovery from an earlier failure."""
    from_storage: int = 0
    """Number of failures after which some rank's state had no copy in memory, so that the job restored from storage."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """Lost wall seconds, by cause, such as ``detect`` or ``fetch``."""
    tokens_lost: float = 0.0
    goodput: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of wall seconds and iterations committed so far, one at each failure and one at the end."""
    losses: list[UpdatesLost] = field(default_factory=list)
    """Lost updates after each failure; empty for a strategy that saves all experts."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: seconds of the committed iterations without any loss, over wall seconds."""
        return self.iterations * self.iteration_s / self.wall_s


def train(
    strategy: StrategyCost, failures: Sequence[Failure], until_s: float, spares: Spares | None = None
) -> TrainingOutcome:
    """Simulate a training until ``until_s``.

    A failure interrupts an iteration or a recovery. The time of an interrupted iteration is lost. An interrupted
    recovery starts again, and then covers all nodes that failed since the last complete recovery.

    Args:
        strategy: strategy of the training. The training begins with its initial state, and does not change it.
        failures: failures in order of time.
        until_s: wall seconds of the training.
        spares: spare nodes; None for an unlimited number.
    """
    iteration_s = strategy.costs.iteration_s
    outcome = TrainingOutcome(until_s, 0, iteration_s)
    outcome.lost_s = dict.fromkeys(
        ("checkpointing", "interrupted", "detect", "no spare", "regroup", "fetch", "convert", "catch up"), 0.0
    )
    pool = _Pool(spares or Spares())
    run_iterations = max(1, math.floor(until_s / iteration_s))
    strategy = strategy.fresh(run_iterations)
    recovering, failed_at, into = dict[str, float](), 0.0, 0.0
    lost, lost_hosts = set[int](), set[int]()
    for failure in (*(drawn for drawn in failures if drawn.at_s < until_s), Failure(until_s, ())):
        ready = failed_at + sum(recovering.values())
        _spend(outcome.lost_s, recovering, failure.at_s - failed_at)
        if failure.at_s >= ready:
            into = _advance(outcome, strategy.overhead_s, failure.at_s - ready)
            lost.clear()
            lost_hosts.clear()
        else:
            outcome.during_recovery += bool(failure.nodes)
        outcome.goodput.append((failure.at_s, outcome.iterations))
        if failure.nodes:
            outcome.failures += 1
            replaced = () if failure.keeps_memory else failure.nodes
            lost |= set(failure.nodes)
            lost_hosts |= set(replaced)
            recovery = strategy.recover(LostState(outcome.iterations, into, lost, lost_hosts))
            outcome.from_storage += recovery.from_storage
            outcome.tokens_lost += recovery.tokens_lost
            if recovery.experts_saved is not None:
                _note_losses(outcome, failure.at_s, recovery.experts_saved, run_iterations)
            failed_at = failure.at_s
            recovering = {
                "detect": recovery.detect_s, "no spare": pool.take(failed_at, len(replaced)),
                "regroup": recovery.regroup_s, "fetch": recovery.fetch_s, "convert": recovery.convert_s,
                "catch up": recovery.catch_up_s,
            }  # fmt: skip
    return outcome


def _note_losses(outcome: TrainingOutcome, at_s: float, experts_saved: int, run_iterations: int) -> None:
    lost = outcome.tokens_lost
    so_far = lost / max(1, outcome.iterations)
    outcome.losses.append(UpdatesLost(at_s, experts_saved, lost, of_run=lost / run_iterations, so_far=so_far))


def _advance(outcome: TrainingOutcome, overhead_s: float, seconds: float) -> float:
    """Train for ``seconds``, and return the share of the interrupted iteration that is done at their end."""
    each = outcome.iteration_s + overhead_s
    # Without 1e-9, a rounding error could make the number of whole iterations too small by one.
    count = math.floor(seconds / each + 1e-9)
    outcome.iterations += count
    outcome.lost_s["checkpointing"] += count * overhead_s
    interrupted_s = max(0.0, seconds - count * each)
    outcome.lost_s["interrupted"] += interrupted_s
    return interrupted_s / each


def _spend(lost: dict[str, float], parts: Mapping[str, float], seconds: float) -> None:
    """Add the parts of a recovery to the lost seconds, but only what falls into the first ``seconds`` of the recovery.

    The next failure may come before the recovery is complete.

    Args:
        lost: lost seconds by part; the function adds to them.
        parts: seconds of each part of the recovery, in order.
        seconds: seconds from the failure to the next failure.
    """
    for name, length in parts.items():
        spent = min(length, seconds)
        lost[name] += spent
        seconds -= spent


class _Pool:
    def __init__(self, spares: Spares) -> None:
        self._spares, self._free = spares, spares.count
        self._repaired: list[float] = []

    def take(self, now: float, count: int) -> float:
        """Take spares for ``count`` nodes that failed at ``now``, and return the seconds until all spares are ready."""
        if self._free is None:
            return 0.0
        for _ in range(count):
            heapq.heappush(self._repaired, now + self._spares.repair_s)
        ready = now
        for _ in range(count):
            while self._repaired and self._repaired[0] <= now:
                heapq.heappop(self._repaired)
                self._free += 1
            if self._free:
                self._free -= 1
            elif self._repaired[0] > now + self._spares.provided_s:
                ready = max(ready, now + self._spares.provided_s)
                # The scheduler keeps the failed node in exchange, so the job gains no spare.
                self._repaired.remove(max(self._repaired))
                heapq.heapify(self._repaired)
            else:
                ready = max(ready, heapq.heappop(self._repaired))
        return ready - now
