"""Slots of each rank, and the expert in each slot.

A rank has the same number of slots in every layer with experts. Expert parallelism spans all data-parallel replicas, so
a job may have any number of replicas. Megatron passes no shared object to its layers. A process therefore has one
:class:`Slots` object, which layers look up when they are built. *Lazarus* is the paper whose allocation of experts this
package follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moevement_core.elastic.tables import StageExperts, Table, tables_of


@dataclass
class Slots:
    """Slots in the MoE layers of this rank's stage, with the expert in each slot."""

    experts: int
    """Number of experts in each layer; E in the Lazarus paper."""
    of_rank: int
    """Number of slots that a rank has in each layer; c in the Lazarus paper."""
    floor: int
    """Least number of replicas of each expert; f in the Lazarus paper.

    The replicas of an expert are on f different nodes if there are enough slots and nodes.
    """
    tables: dict[int, Table] = field(default_factory=dict)
    """Expert in each slot of each rank of the stage, by number of the layer in the model, counted from 0."""

    def table(self, layer: int, nodes: Sequence[str]) -> Table:
        """Return the expert in each slot of a layer, by rank.

        If the layer has not been placed for this number of ranks, the function places it as if all its experts had
        equal loads.

        Args:
            layer: number of the layer in the model, counted from 0.
            nodes: node of each expert-parallel rank of the stage.
        """
        table = self.tables.get(layer)
        if table is None or len(table) != len(nodes):
            stage = StageExperts(nodes, loads={layer: [1] * self.experts}, held={})
            table = self.tables[layer] = tables_of(stage, (), self.of_rank, self.floor)[layer]
        return table

    def place(self, stage: StageExperts, others: Sequence[StageExperts]) -> None:
        """Allocate and place the experts of all layers of this rank's stage anew, with few moves.

        Args:
            stage: stage of this rank.
            others: all other stages of the job. Stages with equally many ranks on the same nodes place their experts
                on nodes alike, so that the job survives more losses of nodes.
        """
        self.tables = tables_of(stage, others, self.of_rank, self.floor)

    def expert(self, layer: int, rank: int, slot: int) -> int:
        """Return the expert in slot ``slot`` of expert-parallel rank ``rank``."""
        return self.tables[layer][rank][slot]

    def is_first(self, layer: int, rank: int, slot: int) -> bool:
        """Return True if a slot holds the first replica of its expert, in the order of ranks and slots."""
        expert = self.expert(layer, rank, slot)
        return (rank, slot) == next(
            (other, number)
            for other, row in enumerate(self.tables[layer])
            for number, held in enumerate(row)
            if held == expert
        )


_slots: Slots | None = None


def slots() -> Slots | None:
    """Return the slots of this process; None if experts are not in slots."""
    return _slots


def use_slots(slots_: Slots | None) -> None:
    """Make ``slots_`` the slots of this process; None if its experts are not in slots."""
    global _slots
    _slots = slots_
