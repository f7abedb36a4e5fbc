"""Largest number of bytes that a rank's snapshots take in host memory. All functions are pure.

A rank holds a fixed number of consecutive snapshots. Windows repeat, so the bytes of these snapshots repeat too. The
oldest held snapshots are a persisted recoverable run. A snapshot of this run may hold gradients of an operator whose
full state is in a later snapshot of the run. No recovery needs these gradients, so the rank frees them at once. It
frees the rest of the snapshot later.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moevement_core.policy.schedule import Contents, Saved, Schedule, slots_with_snapshot

Kept = npt.NDArray[np.int64]
"""Bytes of each snapshot of a window, int64 ``[snapshots, steps]``. Column ``step`` has the bytes that are left after a
rank has freed the gradients that the next ``step`` snapshots make useless. A single column: nothing is freed early."""


def most_held(kept: Kept, count: int) -> int:
    """Return the most bytes that ``count`` consecutive snapshots hold.

    The first of these snapshots may have any position in a window; the result is the maximum over the positions.

    Args:
        kept: bytes of each snapshot of a window.
        count: number of snapshots that a rank holds. The oldest ones are the persisted run, which has as many snapshots
            as a window.
    """
    snapshots, steps = kept.shape
    places = np.arange(count)
    later = np.clip(snapshots - 1 - places, 0, steps - 1)
    return max(int(kept[(first + places) % snapshots, later].sum()) for first in range(snapshots))


def kept_of_table(schedule: Schedule, rank: int = 0) -> Kept:
    """Return the bytes of each snapshot of a window on one rank of the schedule's table.

    The bytes are those of operators only, without boundary records, and are not rounded up to whole pages.
    """
    slots, table = slots_with_snapshot(schedule), schedule.table
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
    """Return, by slot, after how many more slots each operator's full state is saved next, int64 ``[operators]``.

    This number of slots is at most the length of a window. The function goes over the slots once, which is faster than
    calls of :func:`~moevement_core.policy.schedule.superseded_in`.
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
    """Return the gradients that no recovery needs any more.

    Args:
        held: contents of each snapshot that a rank holds, by iteration.
        last: iteration of the last snapshot of the persisted run. Every later recovery restores the
            state of this snapshot, or a newer state. So if a snapshot up to this one has an operator's full state, no
            recovery needs the operator's gradients in earlier snapshots.

    Returns:
        Mask of the operators whose gradients are unneeded, bool ``[operators]``, by iteration of the snapshot with the
        gradients. Snapshots without such operators are left out.
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
