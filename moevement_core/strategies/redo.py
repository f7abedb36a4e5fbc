"""Redo: snapshots hold gradients beside slices of full state, so that a recovery repeats updates, not iterations.

``SS_t`` saves slot ``(t - start) mod W``; ``SS_start`` is the schedule's first snapshot. ``SS_t`` holds full state of
the slot's operators. For all other operators it holds the gradients of the update to ``state@t``. Any W consecutive
snapshots restore the state of the last of these snapshots (:mod:`moevement_core.policy.redo`). So a failure costs the
few iterations whose snapshots have not reached peers yet, and not a whole window.

An update is elementwise, so any rank can repeat it bit for bit from the same inputs. Earlier work logs gradients as
well. In MoEtion peers apply gradients to a copy of the state (section 5.2 there). GoCkpt (arXiv 2511.07035), Checkmate
(NSDI '26) and LowDiff (arXiv 2509.04084) log gradients between checkpoints. Write-ahead logs of databases are older
than these systems. New here is the slice of full state in every snapshot. Only the lost rank is restored, to
exactly the lost state, and the result is verified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Order, Scores
from moevement_core.policy.schedule import Contents, Retention, Rollback, Saved, Schedule, schedule_id
from moevement_core.policy.window import Window, WindowKind, choose_window, impose_window
from moevement_core.strategies.capabilities import ChoosesRecovery, CountsTokens
from moevement_core.strategies.config import RecoveryKind, StrategyConfig
from moevement_core.strategies.moevement import FIRST_WINDOW, NEAR, MoEvement
from moevement_core.strategies.sparse import SparseSchedule
from moevement_core.strategies.strategy import Measured, Proposal, StageOperators, Strategy

BY_REPLAY, BY_REDO = "recovery by replay", "recovery by redo"
"""Names of the two recovery methods in log lines."""
NOT_CARRIED = 1 << 20
"""Number that a rank returns in place of W if its copies or links are too slow for gradients, whatever W is."""


def order_of(table: OperatorTable) -> Order:
    """Return the order of the table, with the experts of each layer sorted by the reversed bits of their numbers.

    A rank holds experts with consecutive numbers. Reversed bits spread these experts over the slots, so every rank has
    about equal bytes in each slot. The order does not depend on the number of ranks. Otherwise it would change when an
    elastic job loses or adds ranks. Snapshots in the new order would not continue the old ones, so a recovery would go
    back further.
    """
    order = np.arange(len(table))
    for layer in np.unique(table.layers[table.is_expert]):
        experts = np.flatnonzero(table.is_expert & (table.layers == layer))
        bits = len(f"{len(experts) - 1:b}")
        order[experts] = experts[np.argsort([int(f"{number:0{bits}b}"[::-1], 2) for number in range(len(experts))])]
    return order


@dataclass(frozen=True, eq=False)
class RedoSchedule(SparseSchedule):
    """Schedule with full state of a slice of the operators in every iteration, and gradients of all others."""

    supersedes = True
    restores_last = True

    @classmethod
    def of(cls, table: OperatorTable, size: int, start: int = 0, rest: int = 0) -> RedoSchedule:
        """Return a schedule whose slots are about equally heavy on every rank.

        Popularity does not decide the order, because all operators are restored in the same way.

        Args:
            table: the operators of the stage.
            size: W, snapshots of a window.
            start: iteration whose state the first snapshot holds.
            rest: iterations without a snapshot after a window.
        """
        order = order_of(table)
        window = impose_window(table.with_gradients_for_compute(), order, size, WindowKind.ROLLING)
        return cls(table, order, window, start=start, rest=rest)

    @cached_property
    def id(self) -> str:
        """Digest of start, window, rest and order, hexadecimal."""
        names = [self.table.names[place] for place in self.order]
        return schedule_id(names, self.start, "redo", self.window.ends, self.rest)

    def contents_of_slot(self, slot: int) -> Contents | None:
        """Return full state of the slot's operators, and gradients of all others; None if the slot has no snapshot."""
        if slot >= self.window.size:
            return None
        full = self.slot_of_operator == slot
        return np.where(full, np.int8(Saved.FULL), np.int8(Saved.GRADIENT))

    def retention(self, lag: int, *, to_disk: bool = False) -> Retention:
        """Return for how many iterations a rank keeps snapshots and logs.

        A recovery repeats all iterations after the end of the persisted run. If a rank has left out a snapshot, this
        run may have ended a window ago, or two windows ago if some iterations have no snapshot.

        While nothing fails, snapshots after that run are still being copied or reported, or have not reached all peers.
        If some iterations have no snapshot (:attr:`rest`), the persisted run may have ended a window ago, and the
        copies of the newest window may take until the end of the next window to arrive.
        """
        logged = (2 if self.rest else 1) * self.size + 3 + 2 * lag
        logged_at_first = 3 + lag + (2 * self.size if self.rest else 0)
        return super().retention(lag, to_disk=to_disk)._replace(logged=logged, logged_at_first=logged_at_first)

    def rollback(self, lag: float) -> Rollback:
        """Return how many iterations a failure costs.

        The mean consists of the iterations whose snapshots peers do not have yet, half of the iterations without a
        snapshot between two windows (the rest), and half of the interrupted iteration.

        Let T be the last committed iteration and L the lag. The newest snapshot that all peers have may be
        ``SS_(T-1-L)``. Then the recovery replays L + 1 iterations. If some iterations have no snapshot, it replays up
        to :attr:`size` iterations more.
        """
        return Rollback(lag + 1.5 + 0.5 * self.rest, math.ceil(lag) + 1 + (self.size if self.rest else 0))

    def digested_once_a_window(self, iteration: int) -> tuple[str, ...]:
        """Return the operators of the next slot.

        Of all operators, these have gone longest without a snapshot of their full state. So a recovery repeats the most
        updates for them, and their digests check the longest chains of updates.
        """
        return self.active((self.slot(iteration) + 1) % self.window.size)

    def for_operators_of(self, other: Schedule) -> RedoSchedule:
        """Return this schedule, but for the operators of ``other``."""
        return self.of(other.table, self.window.size, self.start, self.rest)


class Redo(Strategy, CountsTokens, ChoosesRecovery):
    """Strategy that saves full state and gradients, or MoEvement's windows if gradients are too large.

    Gradients are too large if they do not fit into host memory. Unless the user chose redo, they are also too large if
    copies or links are too slow for them.

    Args:
        table: the operators of the stage.
        windows: strategy for the windows without gradients.
        is_chosen: True if the user chose redo (``--moevement-recovery redo``), False if measurements decide (``auto``).
    """

    name = "moevement"
    is_tuned = True
    flags = MoEvement.flags
    cap_by_default = MoEvement.cap_by_default
    exceeds_cap = True
    orders_by_popularity = True

    @classmethod
    def of(cls, config: StrategyConfig, stage: StageOperators) -> Redo:
        """Return the strategy of a stage; see :meth:`MoEvement.of`."""
        return cls(stage.table, MoEvement.of(config, stage), is_chosen=config.recovery is RecoveryKind.REDO)

    def __init__(self, table: OperatorTable, windows: MoEvement, *, is_chosen: bool = True) -> None:
        super().__init__(table)
        self.windows, self.is_chosen = windows, is_chosen
        self.counts = windows.counts
        self.settled = windows.settled and is_chosen
        self._why = ""

    def first(self, start: int, most: int) -> SparseSchedule:
        """Return a schedule with gradients if the user chose redo, and one without gradients otherwise."""
        size = min(self.windows.size or FIRST_WINDOW, most)
        if not self.is_chosen:
            return self.windows.first(start, most)
        return RedoSchedule.of(self.table, size, start - size)

    def first_without(self, start: int, most: int) -> SparseSchedule | None:
        """Return a schedule without gradients, for a job whose host memory is too small for gradients.

        It needs less memory if gradients are larger than compute weights. The result is None if the schedule from
        :meth:`first` has no gradients either.
        """
        return self.windows.first(start, most) if self.is_chosen else None

    def observe(self, counts: Scores) -> None:
        """Add routed tokens to the popularity that orders windows without gradients."""
        self.windows.observe(counts)

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """Return three numbers: W of windows with gradients, and W and period of windows without gradients.

        The first one is the smallest W for which copies and links are fast enough, or :data:`NOT_CARRIED`.
        """
        assert isinstance(now, SparseSchedule)
        to_save = measured.bytes_to_save(now.mean_bytes, self.windows.cap)
        size = self._size(measured, to_save)
        self._why = self._sentence(size, measured, to_save)
        has_gradients = isinstance(now, RedoSchedule)
        return size, *self.windows.sizes(now, self._without(now).order, measured, has_gradients=has_gradients)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """Propose a schedule with gradients if copies and links are fast enough, or if the user chose redo.

        The last alternatives have no gradients. The job takes them if gradients do not fit into its host memory.
        """
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
        if isinstance(now, RedoSchedule) and _is_near(now, size, period):
            wanted = now
        is_change = wanted is not now
        why = "" if self.is_chosen else f"{BY_REDO}: {self._why}"
        in_force = [now] if isinstance(now, RedoSchedule) and is_change else []
        return Proposal([wanted, *in_force, *without.schedules], is_change, why=why)

    def reason_prefix(self, schedule: Schedule) -> str:
        """Return the name of the recovery method that ``schedule`` is for; empty if the user chose redo."""
        if self.is_chosen:
            return ""
        return BY_REDO if isinstance(schedule, RedoSchedule) else BY_REPLAY

    def accept(self, proposal: Proposal) -> None:
        """Pass ``proposal`` to the strategy of windows without gradients."""
        self.windows.accept(proposal)

    def learned(self) -> Any:
        """Return the learned state of the windows without gradients."""
        return self.windows.learned()

    def adopt(self, learned: Any) -> None:
        """Take over from another rank the learned state of windows without gradients."""
        self.windows.adopt(learned)

    def _size(self, measured: Measured, to_save: float) -> int:
        """Return the smallest W with gradients for which copies and links are fast enough, or :data:`NOT_CARRIED`.

        Copies have to be fast enough for each snapshot, and links for the mean snapshot.

        Args:
            measured: measurements of this rank.
            to_save: mean bytes that an iteration may save.
        """
        table, order = self.table.with_gradients_for_compute(), order_of(self.table)
        if (size := self.windows.size) is not None:
            window = impose_window(table, order, size=size, kind=WindowKind.ROLLING, budget_bytes=measured.copies.bytes)
            # The cap on overhead does not limit a window that the user chose; copies and links do.
            return NOT_CARRIED if window.over_budget or _mean_bytes(window) > measured.link_bytes else size
        window = choose_window(table, order, measured.copies, WindowKind.ROLLING)
        if _mean_bytes(window) > to_save:
            window = impose_window(
                table, order, size=self._size_for(to_save), kind=WindowKind.ROLLING, budget_bytes=measured.copies.bytes
            )
        return NOT_CARRIED if window.over_budget or _mean_bytes(window) > to_save else window.size

    def _size_for(self, to_save: float) -> int:
        """Return the smallest W for which the mean snapshot has at most ``to_save`` bytes.

        The W snapshots of a window together hold each operator's full state once, and its gradients ``W - 1`` times.
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
            f"the largest snapshot has {window.peak_bytes / 1e6:,.1f} MB with gradients (W = {size_shown}), and its "
            f"copy takes {1e3 * copy_s:,.0f} of the {1e3 * measured.iteration_s:,.0f} ms of an iteration; the mean "
            f"snapshot has {_mean_bytes(window) / 1e6:,.1f} MB, and links and the cap on overhead allow "
            f"{'all of it' if size < NOT_CARRIED else f'{to_save / 1e6:,.1f} MB'} to each of {measured.replicas} peers"
        )

    def _without(self, now: Schedule) -> SparseSchedule:
        """Return ``now`` if it has no gradients; else a schedule without gradients, in the order of popularity."""
        if isinstance(now, RedoSchedule):
            return self.windows.first(now.start, now.window.size)
        assert isinstance(now, SparseSchedule)
        return now


def _mean_bytes(window: Window) -> float:
    """Return the mean bytes of a snapshot of ``window``, on the rank that saves the most."""
    return float(window.slot_bytes.sum(axis=1).max()) / window.size


def _is_near(now: RedoSchedule, size: int, period: int) -> bool:
    """Return True if windows of ``size`` snapshots every ``period`` iterations are close to those of ``now``.

    W follows the measured rate of links, which fluctuates. A change of W by one would begin the measurement of the cost
    again, and at every decision.
    """
    least, most = NEAR
    pairs = ((now.window.size, size), (now.size, max(size, period)))
    return all(least * present <= wanted <= most * present for present, wanted in pairs)
