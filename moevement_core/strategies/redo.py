"""Gradients beside slices of full state: what is lost is restored by updates that are made again, without a replay.

Slot ``(t - start) mod W`` is saved with ``state@t``: full state of the slot's operators, and of all others the
gradients that the update to ``state@t`` was made from. Any W consecutive snapshots restore the state of the last of
them (:mod:`moevement_core.policy.redo`), so a failure costs the iterations by which copies lag and not a window.

An update is elementwise, so it can be made again from its inputs anywhere, bit for bit. Gradients that peers apply to a
copy are MoEtion's (its section 5.2); logs of gradients between checkpoints are in GoCkpt (arXiv 2511.07035), Checkmate
(NSDI '26) and LowDiff (arXiv 2509.04084), and write-ahead logs of databases are older than all of them. What is new is
the slice of full state in every snapshot, and with it a restore of the lost rank alone that is exact and verified.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Order, Scores
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.policy.window import Window, WindowKind, choose_window, impose_window
from moevement_core.strategies.moevement import FIRST_WINDOW, MoEvement, is_near
from moevement_core.strategies.sparse import SparseSchedule
from moevement_core.strategies.strategy import Measured, Proposal, Strategy

BY_REPLAY, BY_REDO = "recovery by replay", "recovery by redo"
"""The ways to recover, as they are said to who runs the job."""
NOT_CARRIED = 1 << 20
"""In the place of a window: a slot of none is copied and sent while an iteration runs."""


def order_of(table: OperatorTable) -> Order:
    """That of the table, but for the experts of a layer, which come by their numbers with reversed bits.

    A rank holds experts whose numbers follow each other, so each has about as much in every slot as the others,
    whatever their number. Evened over the ranks that there are the order would change with a job's size, and it would
    fall back to an earlier run.
    """
    order = np.arange(len(table))
    for layer in np.unique(table.layers[table.is_expert]):
        experts = np.flatnonzero(table.is_expert & (table.layers == layer))
        bits = len(f"{len(experts) - 1:b}")
        order[experts] = experts[np.argsort([int(f"{number:0{bits}b}"[::-1], 2) for number in range(len(experts))])]
    return order


@dataclass(frozen=True, eq=False)
class RedoSchedule(SparseSchedule):
    """Full state of a slice of the operators in every iteration, gradients of all others."""

    supersedes = True

    @classmethod
    def of(cls, table: OperatorTable, size: int, start: int = 0, rest: int = 0) -> RedoSchedule:
        """Slots about equally heavy, on every rank; all operators are restored alike, so none comes first.

        Args:
            table: the operators of the stage.
            size: W, iterations.
            start: the iteration whose state the first snapshot holds.
            rest: iterations without a snapshot after a window.
        """
        order = order_of(table)
        window = impose_window(table.with_gradients_for_compute(), order, size, WindowKind.ROLLING)
        return cls(table, order, window, start=start, rest=rest)

    @cached_property
    def id(self) -> str:
        """Of start, window, rest and order."""
        digest = hashlib.sha256(repr((self.start, "redo", self.window.ends, self.rest)).encode())
        digest.update("\n".join(self.table.names[place] for place in self.order).encode())
        return digest.hexdigest()[:16]

    @property
    def reorders(self) -> bool:
        """Never: popularity is of no use."""
        return False

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return full state of the slot's operators and gradients of all others; None in the rest of a window."""
        if slot >= self.window.size:
            return None
        full = self.slot_of_operator == slot
        return np.where(full, np.int8(Saved.FULL), np.int8(Saved.GRADIENT))

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """What is run again begins where a persisted run ends; after a gap that is a window ago and a run."""
        return (2 if self.rest else 1) * self.size + 3 + 2 * lag

    def iterations_logged_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """What is run again begins where the persisted run ends: after what is copied, reported and known.

        With a rest that is up to a window ago, and copies of the newest window take as long to arrive.
        """
        return 3 + lag + (2 * self.size if self.rest else 0)

    def replayed_after(self, run: tuple[int, int]) -> int:
        """From the last snapshot of the run on."""
        return run[1]

    def most_replayed(self, lag: int) -> int:
        """What peers do not have yet: ``SS_(T-1-L)`` is the newest that they may have."""
        return lag + 1 + (self.size if self.rest else 0)

    def expected_rollback(self, lag: float) -> float:
        """The iterations that peers do not have yet, half of the rest, and half of the interrupted one."""
        return lag + 1.5 + 0.5 * self.rest

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """Those of the next slot: of all operators they are restored by the most updates."""
        return self.active((self.slot(iteration) + 1) % self.window.size)

    def for_operators_of(self, other: SparseSchedule) -> RedoSchedule:
        """Windows of this size, of the operators of ``other``."""
        return self.of(other.table, self.window.size, self.start, self.rest)

    def starting_at(self, start: int) -> RedoSchedule:
        """The same window."""
        return replace(self, start=start)


class Redo(Strategy):
    """Full state and gradients, where that fits into host memory and is carried; MoEvement's windows where it does not.

    Args:
        table: the operators of the stage.
        windows: what is done without gradients.
        is_chosen: whether gradients are logged whatever is measured; otherwise only where they are carried.
    """

    name = "moevement"
    is_tuned = True

    def __init__(self, table: OperatorTable, windows: MoEvement, *, is_chosen: bool = True) -> None:
        super().__init__(table)
        self.windows, self.is_chosen = windows, is_chosen
        self.counts = windows.counts
        self.settled = windows.settled and is_chosen
        self._why = ""

    def first(self, start: int, most: int) -> SparseSchedule:
        """Windows with gradients, if they are wanted whatever is measured."""
        size = min(self.windows.size or FIRST_WINDOW, most)
        if not self.is_chosen:
            return self.windows.first(start, most)
        return RedoSchedule.of(self.table, size, start - size)

    def first_without(self, start: int, most: int) -> SparseSchedule | None:
        """MoEvement's windows take less host memory where gradients are heavier than compute weights."""
        return self.windows.first(start, most) if self.is_chosen else None

    def observe(self, counts: Scores) -> None:
        """Windows have an order, should gradients be given up."""
        self.windows.observe(counts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return the fewest snapshots of a window with gradients that are carried, or :data:`NOT_CARRIED`; and what
        windows without gradients would be.
        """
        assert isinstance(now, SparseSchedule)
        to_save = measured.bytes_to_save(now.mean_bytes, self.windows.cap)
        size = self._size(measured, to_save)
        self._why = self._sentence(size, measured, to_save)
        order = self._without(now).order
        return size, *self.windows.sizes(order, measured, now.mean_bytes)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Gradients as far as they are carried, or asked for; and windows without them, if memory has no room."""
        assert isinstance(now, SparseSchedule)
        if sizes is None:
            return (
                Proposal([now], is_change=False) if isinstance(now, RedoSchedule) else self.windows.propose(now, None)
            )
        with_gradients, size, period = sizes
        without = self.windows.propose(self._without(now), (size, period))
        if with_gradients >= NOT_CARRIED and not self.is_chosen:
            return replace(
                without, is_change=without.is_change or isinstance(now, RedoSchedule),
                why=f"{BY_REPLAY}: {self._why}",
            )  # fmt: skip
        if with_gradients < NOT_CARRIED:
            size = period = with_gradients
        wanted = RedoSchedule.of(self.table, size, rest=max(0, period - size))
        if isinstance(now, RedoSchedule) and is_near(now, size, period):
            wanted = now
        is_change = wanted is not now
        why = "" if self.is_chosen else f"{BY_REDO}: {self._why}"
        in_force = [now] if isinstance(now, RedoSchedule) and is_change else []
        return Proposal([wanted, *in_force, *without.schedules], is_change, why=why)

    def way_of(self, schedule: Schedule) -> str:
        """Return the way to recover that ``schedule`` is for, where what is measured decides."""
        if self.is_chosen:
            return ""
        return BY_REDO if isinstance(schedule, RedoSchedule) else BY_REPLAY

    def accept(self, proposal: Proposal) -> None:
        """Windows without gradients have their order from now."""
        self.windows.accept(proposal)

    def learned(self) -> Any:
        """Of the windows."""
        return self.windows.learned()

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        self.windows.adopt(learned)

    def _size(self, measured: Measured, to_save: float) -> int:
        """Return the fewest snapshots of a window that copies carry one by one, and ``to_save`` on average."""
        table, order = self.table.with_gradients_for_compute(), order_of(self.table)
        if (size := self.windows.size) is not None:
            window = impose_window(table, order, size, WindowKind.ROLLING, measured.copies.bytes)
            # A window that was asked for is not measured by what it costs: only by what can be carried.
            return NOT_CARRIED if window.over_budget or _mean_bytes(window) > measured.link_bytes else size
        window = choose_window(table, order, measured.copies, WindowKind.ROLLING)
        if _mean_bytes(window) > to_save:
            window = impose_window(table, order, self._size_for(to_save), WindowKind.ROLLING, measured.copies.bytes)
        return NOT_CARRIED if window.over_budget or _mean_bytes(window) > to_save else window.size

    def _size_for(self, to_save: float) -> int:
        """Return the fewest snapshots that weigh ``to_save`` bytes on average: ``W`` of them hold all full states once,
        and all gradients ``W - 1`` times.
        """
        full, gradient = self.table.full.sum(axis=1).max(), self.table.gradient.sum(axis=1).max()
        if to_save <= gradient:
            return len(self.table)
        return min(len(self.table), max(1, math.ceil((full - gradient) / (to_save - gradient))))

    def _sentence(self, size: int, measured: Measured, to_save: float) -> str:
        table = self.table.with_gradients_for_compute()
        size_shown = min(len(table), size if size < NOT_CARRIED else self.windows.size or len(table))
        window = impose_window(table, order_of(self.table), size_shown, WindowKind.ROLLING)
        copy_s = measured.copies.copy_s(window.peak_bytes)
        return (
            f"a slot of {window.peak_bytes / 1e6:,.1f} MB with its gradients (W = {size_shown}) takes "
            f"{1e3 * copy_s:,.0f} of the {1e3 * measured.iteration_s:,.0f} ms of an iteration to copy, and of "
            f"{_mean_bytes(window) / 1e6:,.1f} MB on average links and the cap on overhead carry "
            f"{'all' if size < NOT_CARRIED else f'{to_save / 1e6:,.1f}'} to {measured.replicas} peers"
        )

    def _without(self, now: Schedule) -> SparseSchedule:
        """A schedule of windows without gradients, whose order is that of the newest popularity."""
        if isinstance(now, RedoSchedule):
            return self.windows.first(now.start, now.window.size)
        assert isinstance(now, SparseSchedule)
        return now


def _mean_bytes(window: Window) -> float:
    """Return the bytes that a snapshot has on average, on the rank that has the most."""
    return float(window.slot_bytes.sum(axis=1).max()) / window.size
