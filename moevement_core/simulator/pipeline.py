"""How long the forward and backward passes of an iteration take on a pipeline: in closed form, and step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moevement_core.errors import ConfigError

Op = tuple[bool, int, int]
"""Whether it is a forward pass, the micro-batch, the chunk."""


@dataclass(frozen=True)
class Pipeline:
    """One data-parallel pipeline under 1F1B; with several chunks a stage under Megatron's interleaved schedule.

    Raises:
        ConfigError: micro-batches that the interleaved schedule does not take.
    """

    forward_s: tuple[float, ...]
    """Of one micro-batch on each stage, all its chunks."""
    backward_s: tuple[float, ...]
    micro_batches: int
    chunks: int = 1
    """Virtual stages of a stage."""
    send_s: float = 0.0
    """Of one tensor to the next stage."""

    def __post_init__(self) -> None:
        if len(self.forward_s) != len(self.backward_s) or not self.forward_s or self.micro_batches < 1:
            raise ConfigError(
                f"{len(self.forward_s)} forward and {len(self.backward_s)} backward times, {self.micro_batches} "
                "micro-batches; needs a pair for each stage and 1 or more"
            )
        if self.chunks > 1 and self.micro_batches % self.stages:
            raise ConfigError(
                f"{self.micro_batches} micro-batches on {self.stages} interleaved stages; needs a multiple of them"
            )

    @property
    def stages(self) -> int:
        """S."""
        return len(self.forward_s)

    def closed_form(self) -> float:
        """``(M + (S - 1) / v) max(t)`` (MoEvement, appendix C; the bubble is v times smaller with v chunks).

        Exact for stages that are alike and sends that take no time.
        """
        slowest = max(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))
        return (self.micro_batches + (self.stages - 1) / self.chunks) * slowest

    def alone(self, stage: int) -> float:
        """Seconds in which ``stage`` replays an iteration from logs: no bubble (MoEvement, section 3.4)."""
        return self.part([stage]).simulate()

    def part(self, stages: Sequence[int]) -> Pipeline:
        """Neighbouring stages by themselves, fed from outside without waiting; their chunks one after another."""
        return replace(
            self,
            forward_s=tuple(self.forward_s[one] for one in stages),
            backward_s=tuple(self.backward_s[one] for one in stages),
            chunks=1,
        )

    def simulate(self) -> float:
        """Seconds from the first forward pass to the last backward pass, each beginning when all it needs is there."""
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
                    seconds = (self.forward_s if op[0] else self.backward_s)[stage] / self.chunks
                    free[stage] = max(free[stage], ready) + seconds
                    ended[stage, op] = free[stage]
                    at[stage] += 1
                    left -= 1
            assert left < before, "the schedule waits for itself"
        return max(free)

    def _ready(self, stage: int, op: Op, ended: dict[tuple[int, Op], float]) -> float | None:
        """When what an operation needs has come; None while it is not known."""
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
        """What a stage does, one after the other: forward passes to fill the pipeline, one of each, the rest."""
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
        """The how many-th pass of a stage: as many micro-batches as stages on one chunk, then on the next."""
        group, inside = divmod(number, self.stages * self.chunks)
        chunk = inside // self.stages
        if self.chunks == 1:
            return forward, number, 0
        return forward, group * self.stages + inside % self.stages, chunk if forward else self.chunks - 1 - chunk
