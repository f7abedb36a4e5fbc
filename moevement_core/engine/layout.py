"""Where the tensors of a snapshot stand in its buffer, and how large that has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.snapshot.snapshot import StateTensor, aligned_bytes, as_bytes, offsets

SLACK = 1.125
"""By how much buffers are larger than the heaviest slot: another order has other slots."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorState:
    """The live tensors of one operator on this rank."""

    compute: tuple[StateTensor, ...]
    full: tuple[StateTensor, ...]
    gradient: tuple[StateTensor, ...] = ()
    """What the update is made from, as it is reduced; needed only where gradients are logged."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotLayout:
    """What a slot of a schedule holds on this rank, and where in a buffer."""

    contents: Contents
    placed: list[tuple[StateTensor, int, Any]]
    """Tensor, offset, and its bytes as a view."""
    gradients: list[tuple[StateTensor, int, Any]]
    """Likewise; they are copied before, when the update is made."""
    nbytes: int


class Layouts:
    """The layouts of the newest schedule's slots, each worked out once.

    Args:
        states: live tensors by operator; views that stay valid.
    """

    def __init__(self, states: Mapping[str, OperatorState]) -> None:
        self._states = states
        self._schedule = ""
        self._layouts: dict[int, SlotLayout] = {}

    def of(self, schedule: Schedule, slot: int) -> SlotLayout:
        """The layout of a slot in which a snapshot is taken."""
        if self._schedule != schedule.id:
            self._layouts.clear()
            self._schedule = schedule.id
        if slot not in self._layouts:
            contents = schedule.contents_of_slot(slot)
            assert contents is not None
            tensors = [tensor for tensor in tensors_of(schedule, contents, self._states) if tensor.nbytes]
            placed = [(tensor, at, as_bytes(tensor.tensor)) for tensor, at in offsets(tensors)]
            gradients = [one for one in placed if one[0].saved is Saved.GRADIENT]
            others = [one for one in placed if one[0].saved is not Saved.GRADIENT]
            self._layouts[slot] = SlotLayout(contents, others, gradients, aligned_bytes(tensors))
        return self._layouts[slot]


def tensors_of(schedule: Schedule, contents: Contents, states: Mapping[str, OperatorState]) -> list[StateTensor]:
    """The live tensors that a snapshot with ``contents`` holds of ``states``."""
    tensors: list[StateTensor] = []
    for name, saved in zip(schedule.table.names, contents, strict=True):
        if state := states.get(name):
            tensors += _SAVED[Saved(int(saved))](state)
    return tensors


_SAVED: Mapping[Saved, Callable[[OperatorState], tuple[StateTensor, ...]]] = {
    Saved.NOTHING: lambda state: (),
    Saved.COMPUTE: lambda state: state.compute,
    Saved.FULL: lambda state: state.full,
    Saved.GRADIENT: lambda state: state.gradient,
    Saved.OMITTED: lambda state: (),
}


def buffer_bytes(schedule: Schedule, states: Mapping[str, OperatorState], record_bytes: int) -> int:
    """Bytes of a buffer that any snapshot of ``states`` under ``schedule`` fits in, and a boundary record."""
    slots = (contents for contents in map(schedule.contents_of_slot, range(schedule.size)) if contents is not None)
    heaviest = max(aligned_bytes(tensors_of(schedule, contents, states)) for contents in slots)
    # What holds everything does so whatever the order.
    return int(heaviest * (1 if schedule.is_dense or not schedule.reorders else SLACK)) + record_bytes
