"""MoEvement's schedule: full state of a slice of the operators in every iteration (section 3.2, Algorithm 1).

``SS_t`` saves slot ``(t - start) mod W``; ``SS_start`` is the schedule's first snapshot. ``SS_t`` holds full state of
the slot's operators. It also holds compute weights: of the operators of later slots in aligned windows, and of all
other operators in rolling windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moevement_core.policy.popularity import Order
from moevement_core.policy.schedule import Cadence, Contents, Retention, Rollback, Saved, Schedule, schedule_id
from moevement_core.policy.window import Window, WindowKind, impose_window


@dataclass(frozen=True, eq=False)
class SparseSchedule(Schedule):
    """Schedule of sparse windows with one order of operators."""

    order: Order
    window: Window
    rest: int = field(default=0, kw_only=True)
    """Iterations without a snapshot between one window and the next."""

    @property
    def size(self) -> int:
        """Iterations from one window to the next: W with a snapshot each, and :attr:`rest` without one."""
        return self.window.size + self.rest

    @property
    def snapshots(self) -> int:
        """Number of snapshots of a window, W."""
        return self.window.size

    @property
    def is_dense(self) -> bool:
        """True if W is 1, so that each snapshot holds the full state of every operator."""
        return self.window.size == 1

    @cached_property
    def id(self) -> str:
        """Digest of start, window, rest and order, hexadecimal."""
        names = [self.table.names[place] for place in self.order]
        return schedule_id(names, self.start, self.window.kind.value, self.window.ends, self.rest)

    @cached_property
    def slot_of_operator(self) -> npt.NDArray[np.int64]:
        """Slot in which each operator of the table saves its full state, int64 ``[operators]``."""
        slots = np.empty(len(self.table), dtype=np.int64)
        slots[self.order] = np.searchsorted(self.window.ends, np.arange(len(self.table)), side="right")
        return slots

    def active(self, slot: int) -> tuple[str, ...]:
        """Return the operators whose full state is saved in ``slot``, in the order of the window."""
        start = self.window.ends[slot - 1] if slot else 0
        return tuple(self.table.names[place] for place in self.order[start : self.window.ends[slot]])

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return the part of each operator's state that a slot's snapshot holds; None for a slot without a snapshot.

        The snapshot holds full state of the slot's operators. In aligned windows it holds compute weights of operators
        of later slots; in rolling windows it holds compute weights of all other operators.
        """
        if slot >= self.window.size:
            return None
        saved = np.zeros(len(self.table), dtype=np.int8)
        frozen = self.slot_of_operator > slot if self.window.kind is WindowKind.ALIGNED else True
        saved[frozen] = Saved.COMPUTE
        saved[self.slot_of_operator == slot] = Saved.FULL
        return saved

    @property
    def mean_bytes(self) -> float:
        """Mean bytes that an iteration saves, over all iterations, on the rank that saves the most."""
        return float(self.window.slot_bytes.sum(axis=1).max()) / self.size

    @property
    def _begins_anywhere(self) -> bool:
        """True if any snapshot may begin a recoverable run: windows are rolling, and every iteration has a snapshot."""
        return self.window.kind is WindowKind.ROLLING and not self.rest

    @property
    def cadence(self) -> Cadence:
        """Runs of W snapshots, which begin with the first slot of a window unless any snapshot may begin a run."""
        run_start = 1 if self._begins_anywhere else self.size
        return Cadence(self.window.size, run_start, decision=self.size, reach=self.size)

    def retention(self, lag: int, *, to_disk: bool = False) -> Retention:
        """Return for how many iterations a rank keeps snapshots and logs.

        A rank keeps at most two recoverable runs, one snapshot that is being copied, and ``lag`` snapshots that peers
        do not have yet. The first run is persisted, and the second is being captured. With ``to_disk`` a third run is
        being written to disk. Rolling windows need a second run only after a reorder, or if a snapshot is missing. Then
        W new snapshots form a run, and the rank keeps the persisted run until they are complete.

        Logs reach back one window further than the oldest kept snapshot, because ranks may abandon a window. The next
        persisted window then comes one window later than usual.

        While nothing fails, and if windows are rolling and every iteration has a snapshot, a rank keeps only the
        persisted run and the snapshots captured since then: one that is being captured (or waits for its gradients),
        one that is being reported to all ranks, and ``lag`` more. With ``to_disk`` it also keeps a run until that run
        is written. Logs hold all iterations since the oldest kept snapshot.
        """
        slots = (3 if to_disk else 2) * self.window.size + 1 + lag
        logged = (4 if to_disk else 3) * self.size + 2 + lag
        if not self._begins_anywhere:
            return Retention(slots, slots, logged, (3 if to_disk else 2) * self.size + 1 + lag)
        at_first = (2 if to_disk else 1) * self.size + 2 + lag
        return Retention(slots, at_first, logged, at_first)

    def rollback(self, lag: float) -> Rollback:
        """Return how many iterations a failure costs.

        The mean is the paper's 3/2 W (section 3.6) if windows are aligned, every iteration has a snapshot and lag is 0.
        At most, a recovery replays all iterations after the first snapshot of the newest persisted run.
        """
        mean = lag + self.window.size + (0.5 if self._begins_anywhere else 0.5 * self.size)
        return Rollback(mean, math.ceil(lag) + self.size + (0 if self._begins_anywhere else self.window.size - 1))

    def for_operators_of(self, other: Schedule) -> SparseSchedule:
        """Return this schedule, but with the operators of ``other`` and in the order of ``other``."""
        assert isinstance(other, SparseSchedule)
        window = impose_window(other.table, other.order, self.window.size, self.window.kind)
        return SparseSchedule(other.table, other.order, window, start=self.start, rest=self.rest)
