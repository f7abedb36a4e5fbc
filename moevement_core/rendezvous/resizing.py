"""Sizes of an elastic job, and the ranks of its members."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Grid:
    """Numbering of ranks, and the sizes to which an elastic job may shrink.

    Ranks count through a *unit* first, then data-parallel replicas, then pipeline stages: Megatron's default order.
    """

    stages: int = 1
    """Pipeline stages."""
    unit: int = 1
    """Ranks that hold one replica of a stage together: tensor times context parallelism, and expert parallelism where
    experts are not elastic."""
    sizes: tuple[int, ...] = ()
    """Numbers of replicas that the job may have, ascending."""
    join_wait_s: float = 0.0
    """Seconds that a process that could enlarge the job waits for others, so that several join together."""

    def encode(self) -> str:
        """Return the text that stands in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Grid:
        """The inverse of :meth:`encode`."""
        fields = json.loads(text)
        return Grid(**{**fields, "sizes": tuple(fields["sizes"])})

    def replicas(self, processes: int) -> int:
        """The most replicas that so many processes make; 0 if they make too few."""
        return max((size for size in self.sizes if size * self.unit * self.stages <= processes), default=0)

    def world(self, replicas: int) -> int:
        """Ranks of a job of so many replicas."""
        return replicas * self.unit * self.stages

    def roster(self, survivors: Mapping[int, int], world: int, free: Sequence[int], replicas: int) -> dict[int, int]:
        """The member that is each rank, of a job that goes on with ``replicas``.

        Whole units keep their stage and their order, so that what they hold stays where it is; what is left of the
        others, and then those who wait, fill the rest.

        Args:
            survivors: members by the ranks that they had.
            world: how many ranks there were.
            free: members that wait, those to be taken first at the beginning.
            replicas: for which there are enough of both.
        """
        had = world // (self.unit * self.stages)
        whole: list[list[list[int]]] = []
        for stage in range(self.stages):
            units = [self._unit(survivors, stage * had + number) for number in range(had)]
            whole.append([unit for unit in units if len(unit) == self.unit][:replicas])
        kept = {member for stage in whole for unit in stage for member in unit}
        others = iter([*(member for _, member in sorted(survivors.items()) if member not in kept), *free])
        ranks: list[int] = []
        for units in whole:
            ranks += [member for unit in units for member in unit]
            ranks += [next(others) for _ in range((replicas - len(units)) * self.unit)]
        return dict(enumerate(ranks))

    def _unit(self, survivors: Mapping[int, int], number: int) -> list[int]:
        ranks = range(number * self.unit, (number + 1) * self.unit)
        return [survivors[rank] for rank in ranks if rank in survivors]
