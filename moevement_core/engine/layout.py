"""Where the tensors of a snapshot stand in its buffer, and how large that has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moevement_core.policy.holding import Kept
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.snapshot.arena import PAGE, in_pages
from moevement_core.snapshot.snapshot import StateTensor, aligned_bytes, as_bytes, offsets


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


def kept_bytes(schedule: Schedule, states: Mapping[str, OperatorState], record_bytes: int) -> Kept:
    """Host memory of each snapshot of a window of ``states``, with a boundary record, as parts of it are given back.

    Returns:
        Bytes, int64 ``[snapshots, 1 or slots]``: of each slot in which a snapshot is taken, when what the next so many
        slots have superseded is given back.
    """
    slots = schedule.slots()
    steps = schedule.size if schedule.supersedes else 1
    kept = np.empty((len(slots), steps), dtype=np.int64)
    for row, slot in enumerate(slots):
        contents = schedule.contents_of_slot(slot)
        assert contents is not None
        starts, ends = _places(schedule, contents, states)
        whole = in_pages(int(ends[-1]) + record_bytes)
        for step in range(steps):
            gone = schedule.superseded(slot, step) if step else np.zeros(len(contents), dtype=bool)
            kept[row, step] = whole - _pages_within(starts, ends, gone)
    return kept


def _places(
    schedule: Schedule, contents: Contents, states: Mapping[str, OperatorState]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each operator's tensors begin and end in a buffer, int64 ``[operators]``."""
    nbytes = [
        aligned_bytes(_SAVED[Saved(int(saved))](states[name])) if name in states else 0
        for name, saved in zip(schedule.table.names, contents, strict=True)
    ]
    ends = np.cumsum(np.array(nbytes, dtype=np.int64))
    return ends - nbytes, ends


def _pages_within(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], gone: npt.NDArray[np.bool_]) -> int:
    """Bytes of the pages that hold nothing but operators that are ``gone``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], gone, [False])).astype(np.int8)))
    first, last = starts[edges[::2]], ends[edges[1::2] - 1]
    return int(np.maximum(last // PAGE - -(-first // PAGE), 0).sum()) * PAGE
