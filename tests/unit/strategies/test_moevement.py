"""Decisions that MoEvement takes from measurements, and the state that it passes to a rank that joins."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from moevement_core.overhead.cap import AIM, MOST_STEP, Evidence
from moevement_core.policy.window import WindowKind
from moevement_core.snapshot.agreement import MOST_PERIOD
from moevement_core.strategies import Measured, MoEvement, SparseSchedule
from tests.unit.policy.tables import equal_experts

TABLE = equal_experts(6)
FAST = Measured(iteration_s=1.0, d2h_bytes_per_s=1e9, replication_bytes_per_s=1e9, replicas=1)


def test_one_window_comes_before_the_start() -> None:
    first = MoEvement(TABLE, WindowKind.ALIGNED, 3).first(100, most=len(TABLE))
    assert (first.start, first.size) == (97, 3)
    assert MoEvement(TABLE, WindowKind.ALIGNED, 30).first(100, most=6).size == 6


def test_a_window_is_measured_unless_it_was_given() -> None:
    fixed, measured = MoEvement(TABLE, size=3), MoEvement(TABLE)
    assert (fixed.settled, measured.settled) == (True, False)
    first = measured.first(0, most=len(TABLE))
    whole, now = TABLE.full.sum(), measured.propose(first, (1, 7)).schedules[0]
    assert isinstance(now, SparseSchedule)
    for cost, allowed in (
        (Evidence(0.001, 0.0, 8), MOST_STEP),
        (Evidence(0.2, 0.01, 8), AIM * 0.02 / 0.21),
    ):
        size, period = measured.wanted_sizes(now, replace(FAST, cost=cost))
        assert size == 1, "copies from the device carry everything at once"
        assert period == math.ceil(whole / (now.mean_bytes * allowed))


def test_windows_stay_until_their_cost_is_known_unless_links_are_too_slow() -> None:
    strategy = MoEvement(TABLE)
    first = strategy.first(0, most=len(TABLE))
    assert strategy.wanted_sizes(first, FAST) == (first.window.size, first.size)
    carried = first.mean_bytes / 2
    slow = replace(FAST, replication_bytes_per_s=carried)
    assert strategy.wanted_sizes(first, slow) == (1, math.ceil(TABLE.full.sum() / carried))


def test_the_cost_of_windows_of_another_form_is_not_known() -> None:
    strategy = MoEvement(TABLE)
    first = strategy.first(0, most=len(TABLE))
    measured = replace(FAST, cost=Evidence(0.02, 0.01, 3))
    _, careful = strategy.wanted_sizes(first, measured)
    assert careful == math.ceil(TABLE.full.sum() / (first.mean_bytes * AIM * 0.02 / 0.03))
    _, often = strategy.wanted_sizes(first, replace(measured, failures_every=10.0, shortened=100.0))
    assert often < careful, "rarer windows would cost more while ranks fail often"


@pytest.mark.parametrize("kind", list(WindowKind))
def test_copies_from_the_device_say_how_many_snapshots_and_links_how_often(kind: WindowKind) -> None:
    strategy = MoEvement(TABLE, kind)
    now, whole = strategy.first(0, most=len(TABLE)), float(TABLE.full.sum())
    slow = Measured(1.0, d2h_bytes_per_s=whole / 2, replication_bytes_per_s=whole / 10, replicas=2)
    size, period = strategy.wanted_sizes(now, slow)
    proposal = strategy.propose(now, (size, period))
    wanted = proposal.schedules[0]
    assert isinstance(wanted, SparseSchedule)
    assert proposal.is_change
    assert (wanted.window.size, wanted.size) == (size, period)
    assert wanted.window.peak_bytes <= whole / 2
    assert wanted.mean_bytes <= whole / 20 * 1.001
    assert wanted.window.slot_bytes.sum() / (period - 1) > whole / 20, "no rarer than links ask for"
    strategy.accept(proposal)
    assert not strategy.propose(wanted, (size, period + 1)).is_change, "measurements move to and fro"
    assert strategy.propose(wanted, (size, 2 * period)).is_change
    assert [wanted.contents_of_slot(slot) is None for slot in range(period)] == [slot >= size for slot in range(period)]


def test_where_nothing_is_carried_windows_are_as_rare_as_they_can_be() -> None:
    strategy = MoEvement(TABLE)
    nothing = Measured(1.0, d2h_bytes_per_s=1e9, replication_bytes_per_s=1e-9, replicas=2)
    assert strategy.wanted_sizes(strategy.first(0, most=len(TABLE)), nothing) == (1, MOST_PERIOD)


def test_experts_that_have_become_popular_are_saved_last() -> None:
    strategy = MoEvement(TABLE, size=3)
    now = strategy.first(0, most=len(TABLE))
    counts = np.where(TABLE.is_expert, np.arange(len(TABLE), 0.0, -1.0), 0.0)
    strategy.observe(counts)
    proposal = strategy.propose(now, None)
    assert proposal.is_change
    assert proposal.reorders
    wanted = proposal.schedules[0]
    assert isinstance(wanted, SparseSchedule)
    experts = [place for place in wanted.order if TABLE.is_expert[place]]
    assert experts == sorted(experts, reverse=True)
    strategy.accept(proposal)
    strategy.observe(counts)
    assert not strategy.propose(wanted, None).is_change, "shares have not changed since"


def test_a_rank_that_joins_decides_as_its_stage() -> None:
    strategy, joined = MoEvement(TABLE, size=3), MoEvement(TABLE, size=3)
    now = strategy.first(0, most=len(TABLE))
    for step in range(3):
        strategy.observe(np.where(TABLE.is_expert, (np.arange(len(TABLE)) + step) % 5, 0.0))
        proposal = strategy.propose(now, None)
        strategy.accept(proposal)
    joined.adopt(strategy.learned())
    for instance in (strategy, joined):
        instance.observe(np.where(TABLE.is_expert, np.arange(len(TABLE)) ** 2.0, 0.0))
    old, new = (instance.propose(now, (2, 2)) for instance in (strategy, joined))
    assert old.reorders == new.reorders
    assert [schedule.id for schedule in old.schedules] == [schedule.id for schedule in new.schedules]
