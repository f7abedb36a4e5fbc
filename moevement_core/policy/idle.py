"""Idle spans of the network within an iteration (GEMINI, section 5), found from the traffic of earlier iterations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 100
"""Number of equal parts into which an iteration is divided."""
BUSY_SHARE = 0.1
"""Share of the highest rate of all samples. Training communicates in a sample whose rate is above this share."""
OFTEN = 0.25
"""Share of the observed iterations. A part of an iteration counts as busy if training communicates in that part in a
larger share of the iterations."""
FILLED = 0.8
"""Share of an idle span that copies may fill. The rest is a reserve, because iterations differ in length."""


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """Bytes that the network carried in a short period of an iteration."""

    offset_s: float
    """Seconds from the beginning of the iteration to the end of the period."""
    length_s: float
    nbytes: int


@dataclass(frozen=True)
class IdleSpans:
    """Idle spans of an iteration. If nothing is known of the traffic, the whole iteration counts as idle."""

    iteration_s: float = math.inf
    spans: tuple[tuple[float, float], ...] = ((0.0, math.inf),)
    """Beginning and end of each idle span, in seconds from the beginning of the iteration, in ascending order."""

    @property
    def idle_s(self) -> float:
        """Idle seconds in an iteration."""
        return sum(end - begin for begin, end in self.spans)

    def wait_s(self, offset_s: float) -> float:
        """Return the seconds until a copy may be sent; 0 in an idle span and after the end of the iteration.

        Args:
            offset_s: present time, in seconds from the beginning of the iteration.
        """
        if offset_s >= self.iteration_s:
            return 0.0
        return next(
            (max(0.0, begin - offset_s) for begin, end in self.spans if offset_s < end), self.iteration_s - offset_s
        )

    def left_s(self, offset_s: float) -> float:
        """Return the seconds for which copies may still be sent in the present idle span.

        The result is infinite outside idle spans. A sender asks only where :meth:`wait_s` is 0, so it gets an infinite
        result only after the usual end of the iteration.

        Args:
            offset_s: present time, in seconds from the beginning of the iteration.
        """
        return next((FILLED * (end - offset_s) for begin, end in self.spans if begin <= offset_s < end), math.inf)


def idle_spans(iterations: Sequence[tuple[float, Sequence[TrafficSample]]]) -> IdleSpans:
    """Return the spans of an iteration in which training leaves the network idle.

    Args:
        iterations: for each observed iteration, its length in seconds and the samples of its traffic. Ranks must not
            save in these iterations.
    """
    samples = [sample for _, group in iterations for sample in group if sample.length_s > 0]
    if not samples:
        return IdleSpans()
    length_s = statistics.median(length for length, _ in iterations)
    least = BUSY_SHARE * max(sample.nbytes / sample.length_s for sample in samples)
    busy = [0] * SLOTS
    for _, group in iterations:
        for slot in {slot for sample in group if sample.length_s > 0 and sample.nbytes / sample.length_s > least
                     for slot in _slots_of(sample, length_s)}:  # fmt: skip
            busy[slot] += 1
    idle = [count <= OFTEN * len(iterations) for count in busy]
    spans: list[tuple[float, float]] = []
    for slot in range(SLOTS):
        if not idle[slot]:
            continue
        begin, end = slot * length_s / SLOTS, (slot + 1) * length_s / SLOTS
        if spans and idle[slot - 1]:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return IdleSpans(length_s, tuple(spans))


def _slots_of(sample: TrafficSample, length_s: float) -> range:
    first = int((sample.offset_s - sample.length_s) / length_s * SLOTS)
    last = math.ceil(sample.offset_s / length_s * SLOTS)
    return range(max(0, first), max(0, min(SLOTS, last)))
