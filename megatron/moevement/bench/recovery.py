"""Benchmark run that alternately loses the memory of one stage and of all stages, and recovers each time.

The training script to measure follows this script on the command line. If a recovery does not restore the lost state
bit for bit, the run ends with an error.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass

import torch.distributed as dist

from megatron.moevement.bench.observed import run_observed
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.session.drill import wipe_and_recover
from moevement_core.session.session import Session
from moevement_core.trainer import observer as observers

STAGE_ENV, EVERY_ENV = "MOEVEMENT_BENCH_STAGE", "MOEVEMENT_BENCH_EVERY"
BEGIN = 6
"""Number of iterations before this benchmark wipes memory for the first time."""


@dataclass
class RecoverySample:
    """Measurement of one iteration or one recovery."""

    kind: str
    """Kind of the sample: ``normal`` for an iteration, ``stage`` or ``all`` for a recovery of one or all stages."""
    wall_s: float
    """Seconds of the iteration, or of the replay in the recovery."""
    cpu_s: float
    """Processor seconds of all ranks together."""
    replayed: int
    fetch_s: float
    fed_bytes: int


class RecoverySampler(observers.Observer):
    """Observer that records every iteration, and wipes and recovers memory every few iterations."""

    def __init__(self, stage: int, every: int) -> None:
        self.samples: list[RecoverySample] = []
        self._stage, self._every = stage, every
        self._began: tuple[float, float] | None = None
        self._next_is_stage = True

    def before_iteration(self, session: Session, committed: int) -> None:
        """Record the iteration that has just ended; wipe and recover memory if it is due."""
        if self._began is not None and committed > 2:
            self._note(*self._began)
        if committed >= BEGIN and committed % self._every == 0:
            stages = frozenset({self._stage}) if self._next_is_stage else None
            done = wipe_and_recover(session.saving.parts, session.recoverer, committed, stages)
            self.samples.append(
                RecoverySample(
                    kind="stage" if stages else "all", wall_s=done.replay_s, cpu_s=done.replay_cpu_s,
                    replayed=done.replayed, fetch_s=done.fetch_s, fed_bytes=done.fed_bytes,
                )
            )  # fmt: skip
            self._next_is_stage = not self._next_is_stage
        dist.barrier()
        self._began = time.perf_counter(), time.process_time()

    def _note(self, began_s: float, began_cpu_s: float) -> None:
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        self.samples.append(
            RecoverySample(
                kind="normal",
                wall_s=wall_s,
                cpu_s=sum(all_gather_objects(cpu_s, float)),
                replayed=0,
                fetch_s=0.0,
                fed_bytes=0,
            )
        )


def main() -> None:
    """Run the training script on the command line, with the observer."""
    observer = RecoverySampler(int(os.environ[STAGE_ENV]), int(os.environ[EVERY_ENV]))
    run_observed(observer, lambda: [asdict(sample) for sample in observer.samples])


if __name__ == "__main__":
    main()
