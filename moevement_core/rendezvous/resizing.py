"""Change of an elastic job's size: the new number of ranks, and the member for each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Grid:
    """Arrangement of an elastic job's ranks in stages and units, and the sizes that the job may have.

    A *unit* is the smallest group of ranks of a stage that the job adds or removes together. It holds one or more whole
    data-parallel replicas of the stage, and its ranks have consecutive numbers. The units of a stage come before those
    of the next stage, as in Megatron's default order of ranks.
    """

    stages: int = 1
    """Number of pipeline stages."""
    unit: int = 1
    """Number of ranks in a unit."""
    sizes: tuple[int, ...] = ()
    """Allowed numbers of units in each stage, ascending."""
    join_wait_s: float = 0.0
    """Seconds that the job waits after the last member joined before it grows.

    So members that join shortly after each other enlarge the job together.
    """

    def encode(self) -> str:
        """Return this object as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Grid:
        """Decode a value that :meth:`encode` has returned."""
        fields = json.loads(text)
        return Grid(**{**fields, "sizes": tuple(fields["sizes"])})

    def units(self, processes: int) -> int:
        """Return the largest allowed number of units in each stage for which ``processes`` suffice.

        The number is 0 if the processes do not suffice for the smallest allowed number.
        """
        return max((size for size in self.sizes if size * self.unit * self.stages <= processes), default=0)

    def world(self, units: int) -> int:
        """Return the number of ranks of a job with ``units`` units in each stage."""
        return units * self.unit * self.stages

    def roster(self, survivors: Mapping[int, int], world: int, free: Sequence[int], units: int) -> dict[int, int]:
        """Return the member for each rank of a job that goes on with ``units`` units in each stage.

        Units that have lost no rank keep their stage and their order, so that their state does not move. Survivors from
        other units take the remaining ranks first, and waiting members take the rest.

        Args:
            survivors: surviving members, by the ranks that they had.
            world: number of ranks before the failure.
            free: waiting members; the first ones take ranks first.
            units: new number of units of a stage; survivors and waiting members suffice for it.
        """
        had = world // (self.unit * self.stages)
        whole: list[list[list[int]]] = []
        for stage in range(self.stages):
            of_stage = [self._unit(survivors, stage * had + number) for number in range(had)]
            whole.append([unit for unit in of_stage if len(unit) == self.unit][:units])
        kept = {member for stage in whole for unit in stage for member in unit}
        others = iter([*(member for _, member in sorted(survivors.items()) if member not in kept), *free])
        ranks: list[int] = []
        for of_stage in whole:
            ranks += [member for unit in of_stage for member in unit]
            ranks += [next(others) for _ in range((units - len(of_stage)) * self.unit)]
        return dict(enumerate(ranks))

    def _unit(self, survivors: Mapping[int, int], number: int) -> list[int]:
        ranks = range(number * self.unit, (number + 1) * self.unit)
        return [survivors[rank] for rank in ranks if rank in survivors]
