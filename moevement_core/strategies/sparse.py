"""MoEvement's schedule: full state of a slice of the operators in every iteration (section 3.2, Algorithm 1).

Slot ``(t - start) mod W`` is saved with ``state@t``: full state of the slot's operators, compute weights of those in
later slots (aligned) or of all others (rolling).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moevement_core.policy.popularity import Order
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.policy.window import Window, WindowKind, impose_window


@dataclass(frozen=True, eq=False)
class SparseSchedule(Schedule):
    """One order and one window."""

    order: Order
    window: Window
    rest: int = field(default=0, kw_only=True)
    """Iterations without a snapshot between a window's last one and the first of the next window."""

    @property
    def size(self) -> int:
        """W snapshots, one in each iteration, and the rest after them."""
        return self.window.size + self.rest

    @property
    def snapshots(self) -> int:
        """W."""
        return self.window.size

    @property
    def is_dense(self) -> bool:
        """A window of one snapshot saves everything, whatever the order."""
        return self.window.size == 1

    @cached_property
    def id(self) -> str:
        """Of start, window, rest and order."""
        digest = hashlib.sha256(repr((self.start, self.window.kind.value, self.window.ends, self.rest)).encode())
        digest.update("\n".join(self.table.names[place] for place in self.order).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def slot_of_operator(self) -> npt.NDArray[np.int64]:
        """The slot in which each operator of the table saves its full state, int64 ``[operators]``."""
        slots = np.empty(len(self.table), dtype=np.int64)
        slots[self.order] = np.searchsorted(self.window.ends, np.arange(len(self.table)), side="right")
        return slots

    def active(self, slot: int) -> tuple[str, ...]:
        """Operators that save full state in ``slot``, in order."""
        start = self.window.ends[slot - 1] if slot else 0
        return tuple(self.table.names[place] for place in self.order[start : self.window.ends[slot]])

    def frozen(self, slot: int) -> tuple[str, ...]:
        """Operators that save compute weights in ``slot``, in order: later ones (aligned) or all others (rolling)."""
        start = self.window.ends[slot - 1] if slot and self.window.kind is WindowKind.ROLLING else 0
        others = self.order[:start], self.order[self.window.ends[slot] :]
        return tuple(self.table.names[place] for part in others for place in part)

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return full state of the slot's operators and compute weights of others; None in the rest of a window."""
        if slot >= self.window.size:
            return None
        saved = np.zeros(len(self.table), dtype=np.int8)
        frozen = self.slot_of_operator > slot if self.window.kind is WindowKind.ALIGNED else True
        saved[frozen] = Saved.COMPUTE
        saved[self.slot_of_operator == slot] = Saved.FULL
        return saved

    def snapshot_bytes(self, iteration: int) -> npt.NDArray[np.int64]:
        """What ``SS_iteration`` weighs on each rank of the table, int64 ``[ranks]``."""
        return self.window.slot_bytes[:, self.slot(iteration)]

    @property
    def mean_bytes(self) -> float:
        """Bytes that an iteration saves, a mean over a window and its rest, on the rank of the table with the most."""
        return float(self.window.slot_bytes.sum(axis=1).max()) / self.size

    def last_of_run(self, first: int) -> int:
        """W snapshots hold everything."""
        return first + self.window.size - 1

    @property
    def begins_anywhere(self) -> bool:
        """Whether a run may begin with any snapshot: windows are rolling, and one follows the other at once."""
        return self.window.kind is WindowKind.ROLLING and not self.rest

    def may_begin_at(self, iteration: int) -> bool:
        """Aligned windows begin with their first slot, rolling ones anywhere."""
        return self.begins_anywhere or self.slot(iteration) == 0

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """A persisted run, the next one, one snapshot being copied, and the lag.

        Rolling windows need as many as aligned ones after a reorder, or when a snapshot is lost: then the next run is W
        new snapshots beside the W that are persisted.
        """
        return (3 if to_disk else 2) * self.window.size + 1 + lag

    def slots_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """Of rolling windows a persisted run, and those that are taken before all ranks know of a newer one.

        One is being captured (or has its gradients), the one before is reported, and then all ranks know of it. Runs
        that are written to disk are freed when they are written.
        """
        if not self.begins_anywhere:
            return self.slots_kept(lag, to_disk=to_disk)
        return (2 if to_disk else 1) * self.size + 2 + lag

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """As far back as snapshots are kept; a window more where one was abandoned, whose place the next takes late."""
        return (4 if to_disk else 3) * self.size + 2 + lag

    def iterations_logged_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """As far back as snapshots are kept."""
        windows = (2 if to_disk else 1) if self.begins_anywhere else (3 if to_disk else 2)
        return windows * self.size + (2 if self.begins_anywhere else 1) + lag

    def most_replayed(self, lag: int) -> int:
        """Back to the first snapshot of the newest run of W that peers have."""
        return lag + (self.size if self.begins_anywhere else self.size + self.window.size - 1)

    def expected_rollback(self, lag: float) -> float:
        """Without lag and rest the aligned one is the paper's 3/2 W (section 3.6)."""
        return lag + self.window.size + (0.5 if self.begins_anywhere else 0.5 * self.size)

    def with_windows_of(self, other: Schedule) -> SparseSchedule:
        """A window of the same kind and size, in this order."""
        assert isinstance(other, SparseSchedule)
        return other.for_operators_of(self)

    def for_operators_of(self, other: SparseSchedule) -> SparseSchedule:
        """Windows like these, of the operators of ``other`` in its order."""
        window = impose_window(other.table, other.order, self.window.size, self.window.kind)
        return SparseSchedule(other.table, other.order, window, start=self.start, rest=self.rest)

    def starting_at(self, start: int) -> SparseSchedule:
        """The same order and window."""
        return replace(self, start=start)
