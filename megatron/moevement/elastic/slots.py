"""Which experts the slots of each rank hold, layer by layer, and by which loads they were allocated.

A rank has as many slots in every layer with experts; expert parallelism spans all data-parallel replicas, so their
number is free. Megatron's layers are not told what a process shares, so there is one :class:`Slots` in a process, which
layers look up when they are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moevement_core.elastic.allocation import allocate
from moevement_core.elastic.migration import migrate
from moevement_core.elastic.placement import place

Table = tuple[tuple[int, ...], ...]
"""Expert in each slot, by expert-parallel rank."""
Loads = Mapping[int, Sequence[int]]
"""Recent tokens of each expert, by layer."""


@dataclass
class Slots:
    """The slots of the MoE layers of this rank's stage: how many there are, and which expert each one holds."""

    experts: int
    """E, of each layer."""
    of_rank: int
    """c, in each layer."""
    floor: int
    """f, replicas that each expert has at least where there are slots for them."""
    tables: dict[int, Table] = field(default_factory=dict)
    """Tables by number of the layer in the model, from 0."""

    def table(self, layer: int, ranks: int) -> Table:
        """Return the table of a layer; experts count as equally loaded where nothing else was placed."""
        found = self.tables.get(layer)
        if found is None or len(found) != ranks:
            found = self.tables[layer] = self._placed([1] * self.experts, {rank: () for rank in range(ranks)})
        return found

    def place(self, layers: Iterable[int], loads: Loads, held: Mapping[int, Mapping[int, Sequence[int]]]) -> None:
        """Allocate and place anew, moving as little as may be.

        Args:
            layers: of this stage.
            loads: of those of which any are known.
            held: by expert-parallel rank, the experts that it has in its slots of each layer; none where it is new.
        """
        for layer in layers:
            tokens = loads.get(layer, [1] * self.experts)
            self.tables[layer] = self._placed(tokens, {rank: its.get(layer, ()) for rank, its in held.items()})

    def _placed(self, tokens: Sequence[int], held: Mapping[int, Sequence[int]]) -> Table:
        ranks = len(held)
        replicas = allocate(np.asarray(tokens, dtype=np.int64), ranks * self.of_rank, self.floor)
        wanted = place(replicas, ranks, self.of_rank, self.floor)
        return tuple(in_place(held[rank], experts) for rank, experts in sorted(migrate(held, wanted).experts.items()))

    def expert(self, layer: int, rank: int, slot: int) -> int:
        """The expert in a slot."""
        return self.tables[layer][rank][slot]

    def is_first(self, layer: int, rank: int, slot: int) -> bool:
        """Return whether the slot holds the first replica of its expert, in the order of ranks and slots."""
        expert = self.expert(layer, rank, slot)
        return (rank, slot) == next(
            (where, number)
            for where, its in enumerate(self.tables[layer])
            for number, one in enumerate(its)
            if one == expert
        )


def in_place(held: Sequence[int], experts: Sequence[int]) -> tuple[int, ...]:
    """The order of ``experts`` in which those that a rank has stay in their slots."""
    left = list(experts)
    slots: list[int | None] = [None] * len(left)
    for slot, expert in enumerate(held[: len(slots)]):
        if expert in left:
            slots[slot] = expert
            left.remove(expert)
    return tuple(left.pop(0) if expert is None else expert for expert in slots)


_slots: Slots | None = None


def slots() -> Slots | None:
    """Returns the slots of this process; None where experts are not in slots."""
    return _slots


def use_slots(its: Slots | None) -> None:
    """Use these slots from now on in this process."""
    global _slots
    _slots = its
