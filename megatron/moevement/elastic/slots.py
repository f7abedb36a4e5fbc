"""Slots of each rank, and the expert in each slot.

A rank has the same number of slots in every layer with experts. Expert parallelism spans all data-parallel replicas, so
a job may have any number of replicas. Megatron passes no shared object to its layers. A process therefore has one
:class:`Slots` object, which layers look up when they are built. Letters are those of the Lazarus paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moevement_core.elastic.allocation import allocate
from moevement_core.elastic.migration import migrate
from moevement_core.elastic.placement import place

Table = tuple[tuple[int, ...], ...]
"""Expert in each slot of a layer, with one row for each expert-parallel rank."""
Loads = Mapping[int, Sequence[int]]
"""Tokens that each expert received recently, by layer."""


@dataclass
class Slots:
    """Slots in the MoE layers of this rank's stage, with the expert in each slot."""

    experts: int
    """Number of experts in each layer; E in Lazarus."""
    of_rank: int
    """Number of slots of a rank in each layer; c in Lazarus."""
    floor: int
    """Smallest number of replicas of an expert, if there are enough slots; f in Lazarus."""
    tables: dict[int, Table] = field(default_factory=dict)
    """Tables by number of the layer in the model, counted from 0."""

    def table(self, layer: int, ranks: int) -> Table:
        """Return the table of a layer.

        A layer without a table for this number of ranks gets a table for equal loads of all experts.
        """
        table = self.tables.get(layer)
        if table is None or len(table) != ranks:
            table = self.tables[layer] = self._placed([1] * self.experts, {rank: () for rank in range(ranks)})
        return table

    def place(self, layers: Iterable[int], loads: Loads, held: Mapping[int, Mapping[int, Sequence[int]]]) -> None:
        """Allocate and place the experts of some layers anew, with as few moves as possible.

        Args:
            layers: layers of this stage, by number in the model.
            loads: recent loads; a layer without an entry is placed for equal loads.
            held: experts that each expert-parallel rank has in its slots, by layer; empty for a new rank.
        """
        for layer in layers:
            tokens = loads.get(layer, [1] * self.experts)
            self.tables[layer] = self._placed(tokens, {rank: of_rank.get(layer, ()) for rank, of_rank in held.items()})

    def _placed(self, tokens: Sequence[int], held: Mapping[int, Sequence[int]]) -> Table:
        ranks = len(held)
        replicas = allocate(np.asarray(tokens, dtype=np.int64), ranks * self.of_rank, self.floor)
        wanted = place(replicas, ranks, self.of_rank, self.floor)
        return tuple(in_place(held[rank], experts) for rank, experts in sorted(migrate(held, wanted).experts.items()))

    def expert(self, layer: int, rank: int, slot: int) -> int:
        """Return the expert in a slot."""
        return self.tables[layer][rank][slot]

    def is_first(self, layer: int, rank: int, slot: int) -> bool:
        """Return True if the slot holds the first replica of its expert, in the order of ranks and slots."""
        expert = self.expert(layer, rank, slot)
        return (rank, slot) == next(
            (other, number)
            for other, row in enumerate(self.tables[layer])
            for number, held in enumerate(row)
            if held == expert
        )


def in_place(held: Sequence[int], experts: Sequence[int]) -> tuple[int, ...]:
    """Return ``experts`` ordered by slot, so that experts that the rank already holds stay in the same slot.

    Args:
        held: expert in each slot of the rank now.
        experts: experts that the rank will hold.
    """
    left = list(experts)
    slots: list[int | None] = [None] * len(left)
    for slot, expert in enumerate(held[: len(slots)]):
        if expert in left:
            slots[slot] = expert
            left.remove(expert)
    return tuple(left.pop(0) if expert is None else expert for expert in slots)


_slots: Slots | None = None


def slots() -> Slots | None:
    """Return the slots of this process; None if experts are not in slots."""
    return _slots


def use_slots(slots_: Slots | None) -> None:
    """Use these slots in this process from now on; None if experts are not in slots."""
    global _slots
    _slots = slots_
