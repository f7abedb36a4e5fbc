"""Snapshots free only parts that no restore point needs, and stay within the bound of :func:`most_held`."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np
import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.engine.layout import OperatorState, kept_bytes
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.holding import most_held, superseded
from moevement_core.policy.redo import redo_runs
from moevement_core.policy.runs import restore_points
from moevement_core.policy.schedule import (
    LAG_ALLOWANCE,
    Contents,
    Saved,
    Schedule,
    last_of_run,
    slots_with_snapshot,
    superseded_in,
)
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.snapshot.arena import PAGE, Arena, in_pages
from moevement_core.snapshot.snapshot import Entry, Header, Snapshot, StateTensor, contents_text, offsets
from moevement_core.strategies import DenseToPeers, RedoSchedule, SparseSchedule


def schedule_of(kind: str, size: int, sizes: list[int], rest: int = 0) -> Schedule:
    table = OperatorTable(
        Operator(expert_name(0, place), OperatorKind.EXPERT, StateBytes(2 * unit, 12 * unit, 4 * unit))
        for place, unit in enumerate(sizes)
    )
    if kind == "redo":
        return RedoSchedule.of(table, size, rest=rest)
    if kind == "dense":
        return DenseToPeers(table, size).first(0, len(table))
    window_kind = WindowKind(kind)
    order = np.arange(len(table))
    return SparseSchedule(table, order, impose_window(table, order, size, window_kind), rest=rest)


def states_of(schedule: Schedule, sizes: list[int]) -> Mapping[str, OperatorState]:
    def tensor(name: str, saved: Saved, nbytes: int) -> tuple[StateTensor, ...]:
        return (StateTensor(name, saved, "w", torch.empty(nbytes, dtype=torch.uint8, device="meta")),)

    return {
        name: OperatorState(
            tensor(name, Saved.COMPUTE, 2 * unit), tensor(name, Saved.FULL, 12 * unit),
            tensor(name, Saved.GRADIENT, 4 * unit),
        )
        for name, unit in zip(schedule.table.names, sizes, strict=True)
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["aligned", "rolling", "redo", "dense"])
@pytest.mark.parametrize("seed", range(10))
def test_a_failure_at_any_moment_finds_what_it_needs_and_no_more_is_held_than_is_said(kind: str, seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    sizes = [random.randint(1, 3 * PAGE) for _ in range(random.randint(6, 14))]
    schedule = schedule_of(kind, random.randint(1, 6), sizes, rest=random.choice([0, 0, 1, 5]))
    states = states_of(schedule, sizes)
    kept = kept_bytes(schedule, states, 100)
    bound = most_held(kept, schedule.retention(LAG_ALLOWANCE, to_disk=False).slots_at_first)
    whole = {slot: int(row[0]) for slot, row in zip(slots_with_snapshot(schedule), kept, strict=True)}
    held: dict[int, Contents] = {}
    acknowledged: set[int] = set()  # iterations whose snapshots all peers have
    persisted, ends, proposed = -1, -1, -1
    most = 0
    for iteration in range(8 * schedule.size + 20):
        agreed = proposed  # proposed an iteration ago
        if agreed > persisted:
            persisted, ends = agreed, last_of_run(schedule, agreed)
        for old in [at for at in held if at < persisted]:
            del held[old]
        if persisted >= 0:
            for at, unneeded in superseded(held, ends).items():
                held[at] = np.where(unneeded, np.int8(Saved.NOTHING), held[at])
            check_way_back(schedule, {at: held[at] for at in acknowledged if at in held}, persisted, ends)
        acknowledged |= {taken for taken in held if taken < iteration - random.randint(0, LAG_ALLOWANCE)}
        delivered = {at: held[at] for at in acknowledged if at in held}
        runs = [run for run in restore_points(delivered) if run.last >= last_of_run(schedule, run.first)]
        proposed = max((run.first for run in runs), default=-1)
        if (contents := schedule.contents_of_slot(schedule.slot(iteration))) is not None:
            held[iteration] = contents.copy()
        most = max(most, sum(bytes_of(schedule, kept, at, parts) for at, parts in held.items()))
    assert most <= bound, (most, bound)
    assert persisted > 0, "windows are persisted"
    assert bound <= sum(whole.values()) * 6


def check_way_back(schedule: Schedule, held: Mapping[int, Contents], first: int, last: int) -> None:
    """Check that snapshots which all peers have restore the persisted run or a newer one, and lack no part for it."""
    runs = list(redo_runs(held)) if schedule.supersedes and schedule.snapshots > 1 else list(restore_points(held))
    assert runs
    assert runs[0].last >= last
    assert any(run.first >= first for run in runs)
    for run in runs:
        if run.last < last:
            continue
        for at in range(int(run.full_at.min()), run.last + 1):
            missing = (run.loads(at) != Saved.NOTHING) & (held[at] == Saved.NOTHING) if at in held else ()
            assert not np.any(missing)
        if run.is_redone:
            for at in range(run.first, run.last + 1):
                needed = run.full_at < at
                assert np.isin(held[at][needed], (Saved.GRADIENT, Saved.FULL)).all()


def bytes_of(schedule: Schedule, kept: np.ndarray, iteration: int, contents: Contents) -> int:
    """Return the bytes of a snapshot that a live rank still holds after later slots superseded some of its parts."""
    slot = schedule.slot(iteration)
    row = slots_with_snapshot(schedule).index(slot)
    if not schedule.supersedes:
        return int(kept[row, 0])
    steps = [step for step in range(schedule.size) if np.array_equal(_after(schedule, slot, step), contents)]
    return int(kept[row, steps[0]])


def _after(schedule: Schedule, slot: int, step: int) -> Contents:
    contents = schedule.contents_of_slot(slot)
    assert contents is not None
    return np.where(superseded_in(schedule, slot, step), np.int8(Saved.NOTHING), contents)


def test_what_is_given_back_is_whole_pages_as_the_arena_counts_them() -> None:
    """Check that the bound counts the pages that a live arena frees."""
    sizes = [PAGE, PAGE // 3, 2 * PAGE, 77, 5 * PAGE, PAGE]
    schedule = schedule_of("redo", 3, sizes)
    states = states_of(schedule, sizes)
    kept = kept_bytes(schedule, states, 100)
    arena = Arena(CpuDevice())
    arena.grow(1000 * PAGE)
    for row, slot in enumerate(slots_with_snapshot(schedule)):
        for step in range(3):
            buffer = _buffer(arena, schedule, slot, step, states)
            assert sum(extent.memory.numel() for extent in buffer.extents) == kept[row, step]
            arena.release(buffer)


def _buffer(arena: Arena, schedule: Schedule, slot: int, step: int, states: Mapping[str, OperatorState]):
    contents = schedule.contents_of_slot(slot)
    assert contents is not None
    tensors = [
        (states[name].full if saved == Saved.FULL else states[name].gradient)[0]
        for name, saved in zip(schedule.table.names, contents, strict=True)
    ]
    placed = list(offsets(tensors))
    nbytes = placed[-1][1] + in_pages(1) // PAGE * -(-placed[-1][0].nbytes // 64) * 64
    buffer = arena.acquire(nbytes + 100)
    assert buffer is not None
    entries = tuple(
        Entry(t.operator, t.saved, t.key, "uint8", at, t.nbytes, "", place) for place, (t, at) in enumerate(placed)
    )
    header = Header(0, slot, "s", slot, contents_text(contents), entries, None, slot)
    _, ranges = Snapshot(header, buffer).without(superseded_in(schedule, slot, step))
    arena.release_parts(buffer, ranges)
    return buffer
