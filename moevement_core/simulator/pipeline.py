"""Seconds of all forward and backward passes of an iteration on a pipeline: in closed form, and by event simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from moevement_core.errors import ConfigError

Op = tuple[bool, int, int]
"""Forward or backward pass on a stage: True for a forward pass, number of the micro-batch, number of the chunk."""
Span = tuple[float, float]
"""Begin and end in seconds."""


@dataclass(frozen=True)
class SimulatedPipeline:
    """Pipeline of one data-parallel replica. Its schedule is 1F1B, or with several chunks Megatron's interleaved 1F1B.

    Raises:
        ConfigError: a stage lacks its forward or its backward seconds, there is no micro-batch, or the interleaved
            schedule does not allow the number of micro-batches.
    """

    forward_s: tuple[float, ...]
    """Seconds of the forward pass of one micro-batch on each stage, over all chunks of the stage."""
    backward_s: tuple[float, ...]
    micro_batches: int
    chunks: int = 1
    """Number of virtual stages of each stage, v."""
    send_s: float = 0.0
    """Seconds to send the activations or gradients of one micro-batch to a neighbouring stage."""

    def __post_init__(self) -> None:
        if len(self.forward_s) != len(self.backward_s) or not self.forward_s or self.micro_batches < 1:
            raise ConfigError(
                f"{len(self.forward_s)} forward and {len(self.backward_s)} backward times, {self.micro_batches} "
                "micro-batches; needs one pair of times for each stage, and 1 or more micro-batches"
            )
        if self.chunks > 1 and self.micro_batches % self.stages:
            raise ConfigError(
                f"{self.micro_batches} micro-batches on {self.stages} interleaved stages; the number of micro-batches "
                "has to be a multiple of the number of stages"
            )

    @property
    def stages(self) -> int:
        """Number of stages, S."""
        return len(self.forward_s)

    def closed_form(self) -> float:
        """Return the seconds of all passes by ``(M + (S - 1) / v) max(t)`` of MoEvement, appendix C.

        M is the number of micro-batches, S that of stages, v that of chunks of a stage, and t the seconds of both
        passes of a micro-batch on a stage. The formula is exact if stages are equal and sends take no time.
        """
        slowest = max(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))
        return (self.micro_batches + (self.stages - 1) / self.chunks) * slowest

    def part(self, stages: Sequence[int]) -> SimulatedPipeline:
        """Return the pipeline that some neighbouring stages form when they replay without other stages (section 3.4).

        Inputs from other stages are always ready, because they come from logs. The result has the 1F1B schedule, in
        which each pass goes through all chunks of its stage.
        """
        return replace(
            self,
            forward_s=tuple(self.forward_s[stage] for stage in stages),
            backward_s=tuple(self.backward_s[stage] for stage in stages),
            chunks=1,
        )

    def simulate(self) -> float:
        """Return the seconds from the first forward pass to the last backward pass.

        Each pass begins as soon as its stage is free and its input has arrived.
        """
        return max(self._ends.values())

    def busy(self, stage: int) -> list[Span]:
        """Return when ``stage`` computes, sends or receives: spans of time, sorted by start, which may overlap."""
        spans = [(end - self._pass_s(stage, op), end) for (place, op), end in self._ends.items() if place == stage]
        for place, op in self._ends:
            source = self._source(place, op)
            if source is not None and source[0] != place and stage in (place, source[0]):
                spans.append((self._ends[source], self._ends[source] + self.send_s))
        return sorted(spans)

    @cached_property
    def _ends(self) -> dict[tuple[int, Op], float]:
        """Time at which each pass ends, by stage and pass, in seconds since the start of the first forward pass."""
        queues = [list(self._order(stage)) for stage in range(self.stages)]
        ended: dict[tuple[int, Op], float] = {}
        free, at = [0.0] * self.stages, [0] * self.stages
        left = sum(map(len, queues))
        while left:
            before = left
            for stage, queue in enumerate(queues):
                while at[stage] < len(queue):
                    op = queue[at[stage]]
                    if (ready := self._ready(stage, op, ended)) is None:
                        break
                    free[stage] = max(free[stage], ready) + self._pass_s(stage, op)
                    ended[stage, op] = free[stage]
                    at[stage] += 1
                    left -= 1
            assert left < before, "no pass of the schedule can begin"
        return ended

    def _pass_s(self, stage: int, op: Op) -> float:
        return (self.forward_s if op[0] else self.backward_s)[stage] / self.chunks

    def _ready(self, stage: int, op: Op, ended: dict[tuple[int, Op], float]) -> float | None:
        """Return when the input of a pass arrives, in seconds; None if the pass that sends it is not simulated yet."""
        source = self._source(stage, op)
        if source is None:
            return 0.0
        if source not in ended:
            return None
        return ended[source] + (self.send_s if source[0] != stage else 0.0)

    def _source(self, stage: int, op: Op) -> tuple[int, Op] | None:
        forward, micro_batch, chunk = op
        last, top = self.stages - 1, self.chunks - 1
        if forward:
            if stage > 0:
                return stage - 1, op
            return (last, (True, micro_batch, chunk - 1)) if chunk else None
        if stage < last:
            return stage + 1, op
        return (0, (False, micro_batch, chunk + 1)) if chunk < top else (last, (True, micro_batch, top))

    def _order(self, stage: int) -> Iterator[Op]:
        """Yield the passes of a stage in the order of the schedule.

        Forward passes fill the pipeline. Then forward and backward passes take turns, and backward passes empty it.
        """
        count = self.micro_batches * self.chunks
        ahead = self.stages - stage - 1
        if self.chunks > 1:
            ahead = 2 * ahead + (self.chunks - 1) * self.stages
        ahead = min(ahead, count)
        for number in range(count + ahead):
            if number < count:
                yield self._op(number, True)
            if number >= ahead:
                yield self._op(number - ahead, False)

    def _op(self, number: int, forward: bool) -> Op:
        """Return a stage's forward (or backward) pass number ``number``, with its micro-batch and its chunk.

        In the interleaved schedule, S micro-batches go through one chunk, one after the other, and then all S go
        through the next chunk. S is the number of stages.
        """
        group, inside = divmod(number, self.stages * self.chunks)
        chunk = inside // self.stages
        if self.chunks == 1:
            return forward, number, 0
        return forward, group * self.stages + inside % self.stages, chunk if forward else self.chunks - 1 - chunk
