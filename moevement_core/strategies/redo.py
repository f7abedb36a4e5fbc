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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Order, Scores
from moevement_core.policy.schedule import Contents, Saved, Schedule
from moevement_core.policy.window import Budget, Window, WindowKind, choose_window, impose_window
from moevement_core.strategies.moevement import FIRST_WINDOW, MoEvement
from moevement_core.strategies.sparse import SparseSchedule
from moevement_core.strategies.strategy import Measured, Proposal, Strategy

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
    def of(cls, table: OperatorTable, size: int, start: int = 0) -> RedoSchedule:
        """Slots about equally heavy, on every rank; all operators are restored alike, so none comes first.

        Args:
            table: the operators of the stage.
            size: W, iterations.
            start: the iteration whose state the first snapshot holds.
        """
        order = order_of(table)
        window = impose_window(table.with_gradients_for_compute(), order, size, WindowKind.ROLLING)
        return cls(table, order, window, start=start)

    @cached_property
    def id(self) -> str:
        """Of start, window and order."""
        digest = hashlib.sha256(repr((self.start, "redo", self.window.ends)).encode())
        digest.update("\n".join(self.table.names[place] for place in self.order).encode())
        return digest.hexdigest()[:16]

    @property
    def reorders(self) -> bool:
        """Never: popularity is of no use."""
        return False

    def contents_of_slot(self, slot: int) -> Contents:
        """Full state of the slot's operators, gradients of all others."""
        full = self.slot_of_operator == slot
        return np.where(full, np.int8(Saved.FULL), np.int8(Saved.GRADIENT))

    def slots_kept(self, lag: int, *, to_disk: bool = False) -> int:
        """As with rolling windows: after a gap the next run is W new snapshots beside the W that are persisted."""
        return max(super().slots_kept(lag, to_disk=to_disk), self.slots_at_first(lag, to_disk=to_disk))

    def iterations_logged(self, lag: int, *, to_disk: bool = False) -> int:
        """What is run again begins where a persisted run ends; after a gap that is a window ago and a run."""
        return self.size + 3 + 2 * lag

    def iterations_logged_at_first(self, lag: int, *, to_disk: bool = False) -> int:
        """What is run again begins where the persisted run ends: after what is copied, reported and known."""
        return 3 + lag

    def replayed_after(self, run: tuple[int, int]) -> int:
        """From the last snapshot of the run on."""
        return run[1]

    def most_replayed(self, lag: int) -> int:
        """What peers do not have yet: ``SS_(T-1-L)`` is the newest that they may have."""
        return lag + 1

    def expected_rollback(self, lag: float) -> float:
        """The iterations that peers do not have yet, and half of the interrupted one."""
        return lag + 1.5

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """Those of the next slot: of all operators they are restored by the most updates."""
        return self.active(self.slot(iteration + 1))

    def for_operators_of(self, other: SparseSchedule) -> RedoSchedule:
        """Windows of this size, of the operators of ``other``."""
        return self.of(other.table, self.size, self.start)

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
        """The smallest window with gradients that is carried, or :data:`NOT_CARRIED`; the smallest without."""
        budget = Budget(
            measured.iteration_s, measured.d2h_bytes_per_s, measured.replication_bytes_per_s, measured.replicas
        )
        window = self._window(budget)
        is_carried = not window.over_budget
        self._why = _sentence(window, budget, is_carried=is_carried)
        return window.size if is_carried else NOT_CARRIED, *self.windows.wanted_sizes(self._without(now), measured)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Gradients as far as they are carried, or asked for; and windows without them, if memory has no room."""
        if sizes is None:
            return (
                Proposal([now], is_change=False) if isinstance(now, RedoSchedule) else self.windows.propose(now, None)
            )
        with_gradients, size = sizes
        without = self.windows.propose(self._without(now), (size,))
        if with_gradients >= NOT_CARRIED and not self.is_chosen:
            return replace(without, why=f"recovery by replay: {self._why}")
        wanted = RedoSchedule.of(self.table, max(size, now.size) if with_gradients >= NOT_CARRIED else with_gradients)
        is_change = wanted.size != now.size or not isinstance(now, RedoSchedule)
        why = "" if self.is_chosen else f"recovery by redo: {self._why}"
        in_force = [now] if isinstance(now, RedoSchedule) else []
        return Proposal([wanted, *in_force, *without.schedules], is_change, why=why)

    def accept(self, proposal: Proposal) -> None:
        """Windows without gradients have their order from now."""
        self.windows.accept(proposal)

    def learned(self) -> Any:
        """Of the windows."""
        return self.windows.learned()

    def adopt(self, learned: Any) -> None:
        """Likewise."""
        self.windows.adopt(learned)

    def _window(self, budget: Budget) -> Window:
        table, order = self.table.with_gradients_for_compute(), order_of(self.table)
        if (size := self.windows.size) is not None:
            return impose_window(table, order, size, WindowKind.ROLLING, budget.bytes)
        return choose_window(table, order, budget, WindowKind.ROLLING)

    def _without(self, now: Schedule) -> SparseSchedule:
        """A schedule of windows without gradients, whose order is that of the newest popularity."""
        if isinstance(now, RedoSchedule):
            return self.windows.first(now.start, now.size)
        assert isinstance(now, SparseSchedule)
        return now


def _sentence(window: Window, budget: Budget, *, is_carried: bool) -> str:
    slot = window.peak_bytes
    return (
        f"a slot of {slot / 1e6:,.1f} MB with its gradients (W = {window.size}) takes "
        f"{1e3 * budget.copy_s(slot):,.0f} ms to copy and {1e3 * budget.send_s(slot):,.0f} ms to send to "
        f"{budget.replicas} peers, "
        f"{'within' if is_carried else 'beyond'} the {1e3 * budget.iteration_s:,.0f} ms of an iteration"
    )
