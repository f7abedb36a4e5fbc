"""Resizing of an elastic job: the new number of ranks, and the member for each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Grid:
    """Grid of the ranks of an elastic job, and the sizes that the job may have.

    A *unit* is the smallest group of ranks of a stage that the job adds or removes together. It holds one or more whole
    data-parallel replicas of the stage, and its ranks have consecutive numbers. The units of a stage come before those
    of the next stage, as in Megatron's default order of ranks.
    """

    stages: int = 1
    """Number of pipeline stages."""
    unit: int = 1
    """Number of ranks in a unit."""
    sizes: tuple[int, ...] = ()
    """Numbers of units that a stage of the job may have, ascending."""
    join_wait_s: float = 0.0
    """Seconds without a new member before the job grows, so that it admits members that join shortly after another."""

    def encode(self) -> str:
        """Return the value for the job's store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Grid:
        """Decode a value that :meth:`encode` has returned."""
        fields = json.loads(text)
        return Grid(**{**fields, "sizes": tuple(fields["sizes"])})

    def units(self, processes: int) -> int:
        """Return the most units of a stage that ``processes`` can form, of the allowed numbers; 0 if too few exist."""
        return max((size for size in self.sizes if size * self.unit * self.stages <= processes), default=0)

    def world(self, units: int) -> int:
        """Return the number of ranks of a job whose stages have ``units`` units each."""
        return units * self.unit * self.stages

    def roster(self, survivors: Mapping[int, int], world: int, free: Sequence[int], units: int) -> dict[int, int]:
        """Return the member for each rank of a job that goes on with ``units`` units in each stage.

        Complete units keep their stage and their order, so that their state does not move. Survivors of incomplete
        units, and then waiting members, take the remaining ranks.

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
