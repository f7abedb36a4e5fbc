"""Benchmark run in three modes: no snapshots, captured snapshots, and captured and sent snapshots.

Blocks of a few iterations alternate between the modes, so that a drift of the machine affects all modes equally. The
training script to measure follows this script on the command line and runs unchanged.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass

from megatron.moevement.bench.observed import run_observed
from moevement_core.session.session import Session
from moevement_core.trainer import observer as observers

MODES = ("off", "capture", "replicate")
BLOCK_ENV = "MOEVEMENT_BENCH_BLOCK"


@dataclass
class OverheadSample:
    """Measurements of one iteration of one rank."""

    iteration: int
    mode: str
    first_of_block: bool
    seconds: float
    """Seconds from the beginning of the iteration to the beginning of the next one."""
    stall_s: float
    begin_s: float
    """Seconds that the training thread spends on recording boundary state and on starting a snapshot's copies."""
    copied_bytes: int
    copy_cpu_s: float
    digest_cpu_s: float
    whole_cpu_s: float
    """Processor seconds of digests over the whole state; 0 in iterations that compute no such digest."""
    replicated_bytes: int


def mode_of(iteration: int, block: int) -> str:
    """Return the mode of ``iteration``, counted from 0, if the mode changes every ``block`` iterations."""
    return MODES[iteration // block % len(MODES)]


class OverheadSampler(observers.Observer):
    """Observer that sets the mode of every iteration and collects measurements."""

    def __init__(self, block: int) -> None:
        self.samples: list[OverheadSample] = []
        self._block = block
        self._began_s: float | None = None

    def before_iteration(self, session: Session, committed: int) -> None:
        """Record the iteration that has just ended, and set the mode of the next one."""
        now_s = time.perf_counter()
        if self._began_s is not None:
            last, progress = committed - 1, session.saving.checkpointer.progress
            self.samples.append(
                OverheadSample(
                    iteration=last, mode=mode_of(last, self._block), first_of_block=last % self._block == 0,
                    seconds=now_s - self._began_s, stall_s=progress.stall_s + progress.gradient_stall_s,
                    begin_s=session.totals.last_begin_s, copied_bytes=progress.copied_bytes,
                    copy_cpu_s=progress.copy_cpu_s, digest_cpu_s=progress.digest_cpu_s,
                    whole_cpu_s=progress.whole_cpu_s, replicated_bytes=progress.replicated_bytes,
                )
            )  # fmt: skip
        self._began_s = now_s
        mode = mode_of(committed, self._block)
        self.is_capturing = mode != "off"
        session.saving.meter.is_measuring = False
        session.saving.checkpointer.replicator.enabled = mode == "replicate"


def main() -> None:
    """Run the training script on the command line, with the observer."""
    observer = OverheadSampler(int(os.environ[BLOCK_ENV]))
    run_observed(observer, lambda: [asdict(sample) for sample in observer.samples])


if __name__ == "__main__":
    main()
