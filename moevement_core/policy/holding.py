"""Most bytes held by snapshots that are freed as early as every restore point allows. All functions are pure.

Windows repeat, and so do the held snapshots: a fixed number of consecutive ones, of which the oldest are a persisted
run. A part of that run that a newer full state has superseded is freed before the rest of its snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moevement_core.policy.schedule import Contents, Saved, Schedule

Kept = npt.NDArray[np.int64]
"""Bytes of each snapshot of a window, int64 ``[snapshots, steps]``, after the parts are freed that the next ``step``
snapshots have superseded. With one step no part is ever freed."""


def most_held(kept: Kept, count: int) -> int:
    """Return the most bytes of ``count`` consecutive snapshots, over all positions of a window at which they may begin.

    Args:
        kept: bytes of each snapshot of a window.
        count: number of held snapshots, of which the first ``snapshots`` are the persisted run.
    """
    snapshots, steps = kept.shape
    places = np.arange(count)
    later = np.clip(snapshots - 1 - places, 0, steps - 1)
    return max(int(kept[(first + places) % snapshots, later].sum()) for first in range(snapshots))


def kept_of_table(schedule: Schedule, rank: int = 0) -> Kept:
    """Return the bytes of each snapshot of a window on one rank of the schedule's table.

    Rounding to pages and records are not included.
    """
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
    """Return for each slot how many slots later each operator's full state is saved again, int64 ``[operators]``.

    The number is a window's length if the full state is not saved again. One pass gives all answers of
    :meth:`Schedule.superseded`.
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
    """Return the parts of ``held`` that no recovery needs if no restore point ends before ``SS_last``.

    Returns:
        Operators whose gradients are followed by a newer full state, bool ``[operators]``, by iteration; iterations
        without such operators are left out.
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
