"""Benchmark run that replays iterations with different shares of frozen operators.

Every round measures all shares, so that a drift of the machine affects all shares equally. Operators become active in
the order of a real replay, the least popular first. The training script to measure follows this script on the command
line. The state of training is useless after the measurement.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch.distributed as dist

from megatron.moevement.bench.observed import run_observed
from moevement_core.operators import OperatorKind
from moevement_core.policy.skew import skewness
from moevement_core.session.session import Session
from moevement_core.strategies import MoEvement, SparseSchedule
from moevement_core.trainer import observer as observers

SHARES_ENV, ROUNDS_ENV = "MOEVEMENT_BENCH_SHARES", "MOEVEMENT_BENCH_ROUNDS"
AT = 8
"""Number of iterations to train before the measurements; from their routing follows how popular experts are."""


@dataclass
class ReplaySample:
    """Measurement of one replayed iteration on one rank."""

    round: int
    share: float
    """Share of operators that are frozen. With share 0, the iteration computes the same as a normal one."""
    seconds: float


class ReplaySampler(observers.Observer):
    """Observer that makes all measurements after :data:`AT` iterations."""

    def __init__(self, shares: Sequence[float], rounds: int) -> None:
        self.samples: list[ReplaySample] = []
        self.skewness = float("nan")
        self._shares, self._rounds = shares, rounds

    def before_iteration(self, session: Session, committed: int) -> None:
        """Replay one iteration for each share in each round, once :data:`AT` iterations are committed."""
        if committed != AT:
            return
        schedule = session.saving.checkpointer.history.newest
        assert isinstance(schedule, SparseSchedule)
        names = [session.saving.topology.table.names[place] for place in schedule.order]
        self.skewness = _skewness(session)
        session.saving.checkpointer.capturer.settle()
        iteration = committed
        with session.recoverer.replaying(), session.binding.replaying(None, None) as trainer:
            for number in range(self._rounds + 1):  # the first round warms up
                # Rounds alternate their direction, so that a drift within a round affects both ends equally.
                for share in self._shares if number % 2 else reversed(self._shares):
                    iteration += 1
                    active = round((1 - share) * len(names))
                    trainer.freeze(iteration, frozenset(names[active:]))
                    dist.barrier()
                    began_s = time.perf_counter()
                    trainer.run(iteration, None)
                    dist.barrier()
                    if number:
                        self.samples.append(ReplaySample(number, share, time.perf_counter() - began_s))


def _skewness(session: Session) -> float:
    """Return the skewness S of the counted routing, as a mean over layers (MoEvement, appendix D)."""
    strategy, layers = session.saving.windows.strategy, dict[str, list[float]]()
    assert isinstance(strategy, MoEvement)
    for name, kind, score in zip(
        session.saving.topology.table.names,
        session.saving.topology.table.kinds,
        strategy.popularity.scores,
        strict=True,
    ):
        if kind is OperatorKind.EXPERT:
            layers.setdefault(name.rsplit(".", 1)[0], []).append(float(score))
    return float(np.mean([skewness(scores) for scores in layers.values()]))


def main() -> None:
    """Run the training script on the command line, with the observer."""
    observer = ReplaySampler(json.loads(os.environ[SHARES_ENV]), int(os.environ[ROUNDS_ENV]))
    run_observed(
        observer,
        lambda: {"skewness": observer.skewness, "samples": [asdict(sample) for sample in observer.samples]},
    )


if __name__ == "__main__":
    main()
