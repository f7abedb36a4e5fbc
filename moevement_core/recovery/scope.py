"""Scope of a recovery: the stages that roll back when some stages lost their state (MoEvement section 3.4, appendix A).

Neighbouring stages that both lost their state have no logs to feed each other. They replay together as a *segment*, and
send each other live tensors. Several segments replay at the same time, and healthy neighbours feed each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Connections between the stages of a pipeline."""

    stages: int
    is_ring: bool = False
    """True if the last stage also sends to the first, as in interleaved schedules."""
    tied: frozenset[int] = frozenset()
    """Stages that each have a copy of one embedding; the copies share one summed gradient. Empty for a single copy.

    With tied embeddings, these are the first and the last stage. With multi-token prediction, these are the first stage
    and the stages that predict further tokens.
    """

    def neighbours(self, stage: int) -> set[int]:
        """Return the stages that ``stage`` exchanges tensors with."""
        near = {stage - 1, stage + 1}
        if self.is_ring:
            near = {other % self.stages for other in near}
        return {other for other in near if 0 <= other < self.stages} - {stage}


def neighbours_of(pipeline: Pipeline, segment: frozenset[int]) -> set[int]:
    """Return the healthy stages that feed ``segment``, a set of stages that replay together."""
    return {neighbour for stage in segment for neighbour in pipeline.neighbours(stage)} - segment


def segments(pipeline: Pipeline, lost: Iterable[int]) -> list[frozenset[int]]:
    """Return the stages that roll back, in segments that replay together, ordered by their smallest stage."""
    left = set(lost)
    if left & pipeline.tied:
        left |= pipeline.tied
    complete = []
    while left:
        segment, edge = set[int](), {min(left)}
        while edge:
            segment |= edge
            near = {neighbour for stage in edge for neighbour in pipeline.neighbours(stage)}
            if edge & pipeline.tied:
                near |= pipeline.tied
            edge = (near & left) - segment
        left -= segment
        complete.append(frozenset(segment))
    return sorted(complete, key=min)
