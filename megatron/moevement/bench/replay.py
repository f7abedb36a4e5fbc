"""A run in which one iteration after another is replayed with more and more operators frozen, in turns.

Shares of frozen operators take turns round after round, so that a drift of the machine meets all alike. Operators are
active in the order in which a replay activates them: the least popular first. The script that is measured follows this
one on the command line; its state is of no use afterwards.
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
from moevement_core.session import observer as observers
from moevement_core.session.session import Session
from moevement_core.strategies import MoEvement, SparseSchedule

SHARES_ENV, ROUNDS_ENV = "MOEVEMENT_BENCH_SHARES", "MOEVEMENT_BENCH_ROUNDS"
AT = 8
"""The iteration before which everything is measured; those before it show what is popular."""


@dataclass
class Sample:
    """Measurements of one iteration of one rank."""

    round: int
    share: float
    """Share of the operators that are frozen; nothing of a normal iteration is different."""
    seconds: float


class Observer(observers.Observer):
    """Measures when the time has come."""

    def __init__(self, shares: Sequence[float], rounds: int) -> None:
        self.samples: list[Sample] = []
        self.skewness = float("nan")
        self._shares, self._rounds = shares, rounds

    def before_iteration(self, session: Session, committed: int) -> None:
        """Replay every share in every round."""
        if committed != AT:
            return
        schedule = session.saving.checkpointer.history.newest
        assert isinstance(schedule, SparseSchedule)
        names = [session.saving.topology.table.names[place] for place in schedule.order]
        self.skewness = _skewness(session)
        session.saving.checkpointer.capturer.settle()
        iteration = committed
        with session.recoverer.replaying(), session.binding.replaying(None, None) as trainer:
            for number in range(self._rounds + 1):  # the first one warms up
                # Boustrophedon: a drift within a round meets both ends alike.
                for share in self._shares if number % 2 else reversed(self._shares):
                    iteration += 1
                    active = round((1 - share) * len(names))
                    trainer.freeze(iteration, frozenset(names[active:]))
                    dist.barrier()
                    began_s = time.perf_counter()
                    trainer.run(iteration, None)
                    dist.barrier()
                    if number:
                        self.samples.append(Sample(number, share, time.perf_counter() - began_s))


def _skewness(session: Session) -> float:
    """S of the counted routing, mean over layers (MoEvement appendix D)."""
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
    """Run the script that follows, observed."""
    observer = Observer(json.loads(os.environ[SHARES_ENV]), int(os.environ[ROUNDS_ENV]))
    run_observed(
        observer,
        lambda: {"skewness": observer.skewness, "samples": [asdict(sample) for sample in observer.samples]},
    )


if __name__ == "__main__":
    main()
