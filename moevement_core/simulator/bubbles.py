"""Copies in pipeline bubbles (MoEtion, section 5.3, Algorithm 4).

A bubble of a stage is a time in which the stage neither computes, sends nor receives. The module finds bubbles for any
schedule that :class:`SimulatedPipeline` simulates. It divides the bytes of a checkpoint into two parts. The first part
is copied in bubbles; the second part is copied while the stage works. The module computes when both parts are complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moevement_core.simulator.iteration import IterationTime
from moevement_core.simulator.pipeline import SimulatedPipeline, Span


class Split(NamedTuple):
    """Bytes of a checkpoint that are copied in bubbles, and bytes that are copied at other times."""

    in_bubbles: int
    beside: int
    """Bytes that are copied outside of bubbles, while the stage computes or communicates."""


@dataclass(frozen=True)
class Bubbles:
    """Bubbles of one stage in an iteration. They are the same in every iteration."""

    spans: tuple[Span, ...]
    """Bubbles in order of time, without overlaps; seconds since the start of the iteration."""
    iteration_s: float

    @cached_property
    def seconds(self) -> float:
        """Seconds of all bubbles of an iteration."""
        return sum(end - begin for begin, end in self.spans)

    def split(self, nbytes: float, bytes_per_s: float, iterations: int = 1) -> Split:
        """Divide a checkpoint: as many bytes as fit are copied in bubbles (``SplitParameter`` of Algorithm 4).

        Args:
            nbytes: bytes of the checkpoint.
            bytes_per_s: bandwidth in a bubble.
            iterations: number of iterations whose bubbles the checkpoint may use.
        """
        whole = math.ceil(nbytes)
        checkpoint_s, bubble_s = nbytes / bytes_per_s, iterations * self.seconds
        if checkpoint_s < bubble_s:
            return Split(whole, 0)
        in_bubbles = math.floor(nbytes * bubble_s / checkpoint_s) if checkpoint_s else 0
        return Split(in_bubbles, whole - in_bubbles)

    def ends_s(self, split: Split, bytes_per_s: float, beside_bytes_per_s: float, iterations: int = 1) -> float:
        """Return the seconds from the start of an iteration until both parts of a checkpoint are complete.

        The first part is copied only in bubbles, and the second part only outside of bubbles. If ``iterations`` are too
        short for the second part, training stops after them until the rest of this part is copied.

        Args:
            split: bytes of the two parts.
            bytes_per_s: bandwidth in a bubble.
            beside_bytes_per_s: bandwidth that training leaves for copies outside of bubbles.
            iterations: number of iterations until training waits for the checkpoint.
        """
        beside_s = split.beside / beside_bytes_per_s
        late_s = beside_s - iterations * (self.iteration_s - self.seconds)
        if late_s > 0:
            return iterations * self.iteration_s + late_s
        return max(
            self._after(self.spans, split.in_bubbles / bytes_per_s),
            self._after(gaps(self.spans, self.iteration_s), beside_s),
        )

    def carried(self, bytes_per_s: float, beside_bytes_per_s: float) -> float:
        """Return the bytes that can be copied in one iteration, in bubbles and outside of them together.

        Args:
            bytes_per_s: bandwidth in a bubble.
            beside_bytes_per_s: bandwidth that training leaves for copies outside of bubbles.
        """
        return bytes_per_s * self.seconds + beside_bytes_per_s * (self.iteration_s - self.seconds)

    def _after(self, spans: Sequence[Span], seconds: float) -> float:
        """Return at which second a copy ends. It takes ``seconds``, and runs only in ``spans`` of each iteration."""
        if seconds <= 0:
            return 0.0
        whole = sum(end - begin for begin, end in spans)
        # A copy that ends exactly at the end of the spans needs no time in the next iteration.
        turns = max(0, math.ceil(seconds / whole - 1e-9) - 1)
        left = seconds - turns * whole
        for begin, end in spans:
            if left <= end - begin + 1e-9 * whole:
                return turns * self.iteration_s + begin + left
            left -= end - begin
        raise AssertionError(f"the copy still needs {left} seconds after the last span")


def bubbles_of(time: IterationTime, stage: int) -> Bubbles:
    """Return the bubbles of a stage; if replicas differ in speed, the bubbles of the replica with least idle time.

    The wait for slower replicas before the reduction of gradients counts as a bubble. The reduction of gradients, the
    gather of parameters and the update do not count.
    """
    until = max(pipeline.simulate() for pipeline in time.pipelines)
    return min((Bubbles(idle(pipeline, stage, until), time.total_s) for pipeline in time.pipelines), key=_seconds)


def _seconds(bubbles: Bubbles) -> float:
    return bubbles.seconds


def idle(pipeline: SimulatedPipeline, stage: int, until: float) -> tuple[Span, ...]:
    """Return when a stage neither computes, sends nor receives, from the first forward pass until ``until`` seconds."""
    return gaps(pipeline.busy(stage), until)


def gaps(spans: Sequence[Span], until: float) -> tuple[Span, ...]:
    """Return the spans of time from 0 until ``until`` seconds that no span of ``spans`` covers.

    Args:
        spans: spans, sorted by start; they may overlap.
        until: end of the last gap, in seconds.
    """
    between, at = [], 0.0
    for begin, end in (*spans, (until, until)):
        # A shorter gap is only a rounding error of a sum of seconds.
        if begin - at > 1e-9 * until:
            between.append((at, begin))
        at = max(at, end)
    return tuple(between)
