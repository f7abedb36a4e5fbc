"""Which stages roll back when some have lost their state (MoEvement section 3.4 and appendix A).

Neighbouring stages that are both lost have no log of each other and replay together, with live sends between them: a
*segment*. Segments that do not touch replay at the same time, each fed by its healthy neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What ties stages to each other."""

    stages: int
    is_ring: bool = False
    """Whether the last stage also sends to the first: interleaved schedules."""
    tied: frozenset[int] = frozenset()
    """Stages that each have a copy of one embedding, whose gradient is a sum over all of them: first and last with tied
    embeddings, first and those of multi-token prediction; none where there is one copy."""

    def neighbours(self, stage: int) -> set[int]:
        """Stages that ``stage`` exchanges tensors with."""
        near = {stage - 1, stage + 1}
        if self.is_ring:
            near = {one % self.stages for one in near}
        return {one for one in near if 0 <= one < self.stages} - {stage}


def neighbours_of(pipeline: Pipeline, segment: frozenset[int]) -> set[int]:
    """Healthy stages that feed a segment."""
    return {one for stage in segment for one in pipeline.neighbours(stage)} - segment


def segments(pipeline: Pipeline, lost: Iterable[int]) -> list[frozenset[int]]:
    """The stages that roll back, by groups that replay together; the smallest stage first."""
    left = set(lost)
    if left & pipeline.tied:
        left |= pipeline.tied
    found = []
    while left:
        segment, edge = set[int](), {min(left)}
        while edge:
            segment |= edge
            near = {one for stage in edge for one in pipeline.neighbours(stage)}
            if edge & pipeline.tied:
                near |= pipeline.tied
            edge = (near & left) - segment
        left -= segment
        found.append(frozenset(segment))
    return sorted(found, key=min)
