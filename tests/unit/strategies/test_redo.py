"""Windows that redo chooses from the rates of copies and links, and from the cap on overhead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.overhead.cap import Evidence
from moevement_core.strategies import Measured, MoEvement, Redo, RedoSchedule, SparseSchedule
from moevement_core.strategies.redo import NOT_CARRIED

TABLE = OperatorTable(
    Operator(expert_name(0, number), OperatorKind.EXPERT, StateBytes(200, 400, 800, 400)) for number in range(24)
)
FULL, GRADIENT = float(TABLE.full.sum()), float(TABLE.gradient.sum())
QUICK = Measured(1.0, d2h_bytes_per_s=1e12, replication_bytes_per_s=1e12, replicas=1)


def decided(strategy: Redo, now: SparseSchedule, measured: Measured) -> SparseSchedule:
    """Return the schedule that follows ``now``."""
    chosen = strategy.propose(now, strategy.wanted_sizes(now, measured)).schedules[0]
    assert isinstance(chosen, SparseSchedule)
    return chosen


def test_what_is_too_expensive_becomes_less_again_and_again() -> None:
    """Let each fifth of the state that an iteration saves cost a hundredth of the training time."""
    strategy = Redo(TABLE, MoEvement(TABLE))
    assert strategy.is_tuned
    now = strategy.first(0, most=len(TABLE))
    for _ in range(8):
        cost = Evidence(0.05 * now.mean_bytes / FULL, 0.0, 16)
        now = decided(strategy, now, replace(QUICK, cost=cost))
    assert isinstance(now, RedoSchedule)
    assert 0.05 * now.mean_bytes / FULL <= 0.02


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_windows_are_as_short_as_the_mean_of_their_snapshots_allows(share: float) -> None:
    to_save = GRADIENT + share * (FULL - GRADIENT)
    strategy = Redo(TABLE, MoEvement(TABLE), is_chosen=False)
    now = RedoSchedule.of(TABLE, 1)
    chosen = decided(strategy, now, replace(QUICK, replication_bytes_per_s=to_save))
    assert isinstance(chosen, RedoSchedule)
    assert chosen.rest == 0
    assert chosen.mean_bytes <= to_save
    shorter = RedoSchedule.of(TABLE, chosen.window.size - 1)
    assert shorter.mean_bytes > to_save


@pytest.mark.parametrize("is_chosen", [True, False])
def test_where_gradients_are_not_carried_windows_rest_or_do_without(is_chosen: bool) -> None:
    strategy = Redo(TABLE, MoEvement(TABLE), is_chosen=is_chosen)
    now = RedoSchedule.of(TABLE, 3)
    slow = replace(QUICK, replication_bytes_per_s=GRADIENT / 2)
    assert strategy.wanted_sizes(now, slow)[0] == NOT_CARRIED
    chosen = decided(strategy, now, slow)
    assert isinstance(chosen, RedoSchedule) == is_chosen
    assert chosen.rest > 0
    assert chosen.mean_bytes <= GRADIENT / 2


def test_a_window_that_was_asked_for_has_gradients_wherever_links_carry_them() -> None:
    strategy = Redo(TABLE, MoEvement(TABLE, size=3), is_chosen=False)
    now = strategy.first(0, most=len(TABLE))
    dear = replace(QUICK, cost=Evidence(0.5, 0.0, 16))
    assert isinstance(decided(strategy, now, dear), RedoSchedule)
    slow = replace(QUICK, replication_bytes_per_s=GRADIENT / 2)
    assert not isinstance(decided(strategy, now, slow), RedoSchedule)


def test_windows_without_gradients_come_no_more_often_while_their_cost_is_unknown() -> None:
    strategy = Redo(TABLE, MoEvement(TABLE), is_chosen=False)
    first = strategy.first(0, most=len(TABLE))
    slow = replace(QUICK, d2h_bytes_per_s=GRADIENT / 2, replication_bytes_per_s=FULL)
    chosen = decided(strategy, first, slow)
    assert not isinstance(chosen, RedoSchedule)
    assert chosen.size >= first.size
    links = replace(QUICK, replication_bytes_per_s=GRADIENT / 2)
    unchanged = decided(strategy, first, links)
    assert (unchanged.window.size, unchanged.size) == (first.window.size, first.size)
    gradients = RedoSchedule.of(TABLE, 8)
    without = decided(strategy, gradients, links)
    assert not isinstance(without, RedoSchedule)
    assert without.size >= gradients.size


def test_a_link_whose_rate_fluctuates_does_not_change_w_at_every_decision() -> None:
    strategy = Redo(TABLE, MoEvement(TABLE))
    now = RedoSchedule.of(TABLE, 8)
    for size, is_change in ((7, False), (9, False), (10, False), (12, True), (4, True)):
        assert strategy.propose(now, (size, 1, size)).is_change == is_change, size
