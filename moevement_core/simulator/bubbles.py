"""Copies in pipeline bubbles (MoEtion, section 5.3, Algorithm 4).

A bubble of a stage is a time in which the stage neither computes, sends nor receives. The module finds bubbles for any
schedule that :class:`Pipeline` simulates. It splits a checkpoint into a part for the bubbles and a part that is copied
beside training, and computes when both parts are complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moevement_core.simulator.iteration import IterationTime
from moevement_core.simulator.pipeline import Pipeline, Span


class Split(NamedTuple):
    """Bytes of a checkpoint by the time of their transfer."""

    in_bubbles: int
    beside: int
    """Bytes that are copied while the stage computes or communicates."""


@dataclass(frozen=True)
class Bubbles:
    """Bubbles of one stage in an iteration; every iteration has the same."""

    spans: tuple[Span, ...]
    """Bubbles in order of time, without overlaps; seconds since the begin of the iteration."""
    iteration_s: float

    @cached_property
    def seconds(self) -> float:
        """Seconds of all bubbles of an iteration."""
        return sum(end - begin for begin, end in self.spans)

    def split(self, nbytes: float, bytes_per_s: float, iterations: int = 1) -> Split:
        """Return how a checkpoint is divided (``SplitParameter``).

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
        """Return the seconds from the begin of an iteration until both parts of a checkpoint are complete.

        Each part has its own times. The first part is copied in bubbles only, the second part outside of bubbles only.
        If the second part takes longer than the checkpoint's iterations, training waits for it, without bubbles.

        Args:
            split: bytes of both parts.
            bytes_per_s: bandwidth in a bubble.
            beside_bytes_per_s: bandwidth that training leaves outside of bubbles.
            iterations: number of iterations that the checkpoint may take.
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
        """Return the bytes that an iteration can carry, in bubbles and outside of them."""
        return bytes_per_s * self.seconds + beside_bytes_per_s * (self.iteration_s - self.seconds)

    def _after(self, spans: Sequence[Span], seconds: float) -> float:
        """Return when ``seconds`` of ``spans`` have passed; the spans repeat in every iteration."""
        if seconds <= 0:
            return 0.0
        whole = sum(end - begin for begin, end in spans)
        # A part that ends exactly with an iteration does not wait for the next one.
        turns = max(0, math.ceil(seconds / whole - 1e-9) - 1)
        left = seconds - turns * whole
        for begin, end in spans:
            if left <= end - begin + 1e-9 * whole:
                return turns * self.iteration_s + begin + left
            left -= end - begin
        raise AssertionError(f"{left} seconds are left after the last span")


def bubbles_of(time: IterationTime, stage: int) -> Bubbles:
    """Return the bubbles of a stage; with different data-parallel replicas, those of the replica with least idle time.

    The wait for slower replicas before gradients are reduced is a bubble too. Synchronisation and update are none.
    """
    until = max(pipeline.simulate() for pipeline in time.pipelines)
    return min((Bubbles(idle(pipeline, stage, until), time.total_s) for pipeline in time.pipelines), key=_seconds)


def _seconds(bubbles: Bubbles) -> float:
    return bubbles.seconds


def idle(pipeline: Pipeline, stage: int, until: float) -> tuple[Span, ...]:
    """Return when a stage neither computes, sends nor receives, from the first forward pass until ``until`` seconds."""
    return gaps(pipeline.busy(stage), until)


def gaps(spans: Sequence[Span], until: float) -> tuple[Span, ...]:
    """Return the spans between ``spans``, from 0 until ``until`` seconds.

    Args:
        spans: spans in order of their begins; they may overlap.
        until: end of the last gap.
    """
    between, at = [], 0.0
    for begin, end in (*spans, (until, until)):
        # Shorter gaps than this are rounding errors of sums of seconds.
        if begin - at > 1e-9 * until:
            between.append((at, begin))
        at = max(at, end)
    return tuple(between)
