"""Most bytes held by snapshots that are freed as early as any restore point allows. Pure.

Windows repeat, so what is held repeats: any so many snapshots in a row, of which the oldest are a persisted run. What a
newer full state has superseded of those is given back before the whole snapshot is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moevement_core.policy.schedule import Contents, Saved, Schedule

Kept = npt.NDArray[np.int64]
"""Bytes of each snapshot of a window, int64 ``[snapshots, steps]``, when what the next ``step`` snapshots have
superseded is given back; with one step nothing ever is."""


def most_held(kept: Kept, count: int) -> int:
    """The most bytes of ``count`` snapshots in a row, at whichever of a window they begin.

    Args:
        kept: of each snapshot of a window.
        count: how many are held; the first window's length of them are the persisted run.
    """
    snapshots, steps = kept.shape
    places = np.arange(count)
    later = np.clip(snapshots - 1 - places, 0, steps - 1)
    return max(int(kept[(first + places) % snapshots, later].sum()) for first in range(snapshots))


def kept_of_table(schedule: Schedule, rank: int = 0) -> Kept:
    """Bytes of each snapshot of a window on one rank of the schedule's table, without pages and records."""
    slots, table = schedule.slots(), schedule.table
    compute, full, gradient = table.compute[rank], table.full[rank], table.gradient[rank]
    steps = schedule.size if schedule.supersedes else 1
    kept = np.zeros((len(slots), steps), dtype=np.int64)
    superseded_after = _superseded_after(schedule) if schedule.supersedes else {}
    for row, slot in enumerate(slots):
        contents = schedule.contents_of_slot(slot)
        assert contents is not None
        gradients = contents == Saved.GRADIENT
        kept[row] = compute[contents == Saved.COMPUTE].sum() + full[contents == Saved.FULL].sum()
        kept[row] += gradient[gradients].sum()
        if schedule.supersedes:
            freed = np.zeros(steps + 1, dtype=np.int64)
            np.add.at(freed, superseded_after[slot][gradients], gradient[gradients])
            kept[row] -= np.cumsum(freed)[:steps]
    return kept


def _superseded_after(schedule: Schedule) -> dict[int, npt.NDArray[np.int64]]:
    """Return after how many slots the full state of each operator is saved again, for each slot, int64 ``[operators]``;
    a window's length if never. One pass over all answers of :meth:`Schedule.superseded`.
    """
    size = schedule.size
    saved = [schedule.contents_of_slot(slot) for slot in range(size)]
    after: dict[int, npt.NDArray[np.int64]] = {}
    newest = np.full(len(schedule.table), 2 * size, dtype=np.int64)
    for place in range(2 * size - 1, -1, -1):
        if place < size:
            after[place] = np.minimum(newest - place, size)
        if (contents := saved[place % size]) is not None:
            newest[contents == Saved.FULL] = place
    return after


def superseded(held: Mapping[int, Contents], last: int) -> dict[int, npt.NDArray[np.bool_]]:
    """Return the parts of ``held`` that are not needed if no restore point ends before ``SS_last``.

    Returns:
        By iteration, of those of which it is something: the operators whose gradients are followed by a newer full
        state, bool ``[operators]``.
    """
    unneeded = {}
    newer: npt.NDArray[np.bool_] | None = None
    for iteration in sorted((number for number in held if number <= last), reverse=True):
        saved = held[iteration]
        if newer is not None and len(newer) == len(saved):
            unused = newer & (saved == Saved.GRADIENT)
            if unused.any():
                unneeded[iteration] = unused
        else:
            newer = np.zeros(len(saved), dtype=bool)
        newer = newer | (saved == Saved.FULL)
    return unneeded
