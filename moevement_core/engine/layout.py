"""Layout of a snapshot's tensors in its buffer, and the size of that buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moevement_core.policy.holding import Kept
from moevement_core.policy.schedule import Contents, Saved, Schedule, slots_with_snapshot, superseded_in
from moevement_core.snapshot.arena import PAGE, in_pages
from moevement_core.snapshot.snapshot import StateTensor, aligned_bytes, as_bytes, offsets


@dataclass(frozen=True, slots=True, eq=False)
class OperatorState:
    """Live tensors of one operator on this rank."""

    compute: tuple[StateTensor, ...]
    full: tuple[StateTensor, ...]
    gradient: tuple[StateTensor, ...] = ()
    """Reduced gradients that the optimizer consumes; empty unless gradients are logged."""


def in_order(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, by name, in an order that all ranks have.

    An optimizer orders the state that it loads from a checkpoint in another way than the state that it makes, and
    digests depend on the order. The order here is that in which torch's optimizers make their state: ``step`` is first.
    """
    return {name: state[name] for name in sorted(state, key=lambda name: (name != "step", name))}


@dataclass(frozen=True, slots=True, eq=False)
class SlotLayout:
    """Layout of the snapshot of one slot on this rank: its contents, and the offset of each tensor in a buffer."""

    contents: Contents
    placed: list[tuple[StateTensor, int, Any]]
    """Tensors except gradients, each with its offset in bytes and a view of its bytes."""
    gradients: list[tuple[StateTensor, int, Any]]
    """Gradients in the form of :attr:`placed`. The rank copies them before other tensors, during the optimizer step."""
    nbytes: int


class Layouts:
    """Layouts of the newest schedule's slots, each computed once.

    Args:
        states: live tensors by operator; they stay valid for the whole job.
    """

    def __init__(self, states: Mapping[str, OperatorState]) -> None:
        self._states = states
        self._schedule = ""
        self._layouts: dict[int, SlotLayout] = {}

    def of(self, schedule: Schedule, slot: int) -> SlotLayout:
        """Return the layout of the snapshot that ``schedule`` takes in ``slot``."""
        if self._schedule != schedule.id:
            self._layouts.clear()
            self._schedule = schedule.id
        if slot not in self._layouts:
            contents = schedule.contents_of_slot(slot)
            assert contents is not None
            tensors = [tensor for tensor in tensors_of(schedule, contents, self._states) if tensor.nbytes]
            placed = [(tensor, at, as_bytes(tensor.tensor)) for tensor, at in offsets(tensors)]
            gradients = [place for place in placed if place[0].saved is Saved.GRADIENT]
            others = [place for place in placed if place[0].saved is not Saved.GRADIENT]
            self._layouts[slot] = SlotLayout(contents, others, gradients, aligned_bytes(tensors))
        return self._layouts[slot]


def tensors_of(schedule: Schedule, contents: Contents, states: Mapping[str, OperatorState]) -> list[StateTensor]:
    """Return the live tensors of ``states`` that a snapshot with ``contents`` holds."""
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


def kept_bytes(
    schedule: Schedule, states: Mapping[str, OperatorState], record_bytes: int, *, at_peers: bool = False
) -> Kept:
    """Return the bytes of host memory of each snapshot of a window, at its capture and after each later snapshot.

    A later snapshot supersedes an operator in an earlier one if it has a newer full state of that operator. The memory
    of superseded operators can be freed.

    Args:
        schedule: the schedule of the window.
        states: live tensors of this rank's operators.
        record_bytes: bytes of a boundary record.
        at_peers: True for the parts of snapshots that peers receive; False for own snapshots.

    Returns:
        Bytes, int64 ``[snapshots, columns]``: a row for each slot in which a snapshot is taken. Column k has the bytes
        that remain after the snapshots of the next k slots, once the operators that these supersede are freed. There
        is a column for each slot, or only column 0 if snapshots of ``schedule`` supersede nothing.
    """
    slots = slots_with_snapshot(schedule)
    steps = schedule.size if schedule.supersedes else 1
    kept = np.empty((len(slots), steps), dtype=np.int64)
    for row, slot in enumerate(slots):
        part = schedule.parts_of_slot(slot).at_peers if at_peers else None
        contents = schedule.contents_of_slot(slot) if part is None else part
        assert contents is not None
        starts, ends = _places(schedule, contents, states)
        whole = in_pages(int(ends[-1]) + record_bytes)
        for step in range(steps):
            freed = superseded_in(schedule, slot, step) if step else np.zeros(len(contents), dtype=bool)
            kept[row, step] = whole - _pages_within(starts, ends, freed)
    return kept


def _places(
    schedule: Schedule, contents: Contents, states: Mapping[str, OperatorState]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each operator's tensors begin and end in a buffer, in bytes, both int64 ``[operators]``."""
    nbytes = [
        aligned_bytes(_SAVED[Saved(int(saved))](states[name])) if name in states else 0
        for name, saved in zip(schedule.table.names, contents, strict=True)
    ]
    ends = np.cumsum(np.array(nbytes, dtype=np.int64))
    return ends - nbytes, ends


def _pages_within(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], freed: npt.NDArray[np.bool_]) -> int:
    """Return the bytes of the pages that hold only operators marked in ``freed``, bool ``[operators]``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], freed, [False])).astype(np.int8)))
    first, last = starts[edges[::2]], ends[edges[1::2] - 1]
    return int(np.maximum(last // PAGE - -(-first // PAGE), 0).sum()) * PAGE
