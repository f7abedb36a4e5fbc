"""What MoEvement decides by what it is told, and what it hands to a rank that joins."""

from __future__ import annotations

import numpy as np

from moevement_core.policy.window import WindowKind
from moevement_core.strategies import Measured, MoEvement, SparseSchedule
from tests.unit.policy.tables import equal_experts

TABLE = equal_experts(6)
FAST = Measured(iteration_s=1.0, d2h_bytes_per_s=1e9, replication_bytes_per_s=1e9, replicas=1)


def test_one_window_comes_before_the_start() -> None:
    first = MoEvement(TABLE, WindowKind.ALIGNED, 3).first(100, most=len(TABLE))
    assert (first.start, first.size) == (97, 3)
    assert MoEvement(TABLE, WindowKind.ALIGNED, 30).first(100, most=6).size == 6


def test_a_window_is_measured_unless_it_was_given() -> None:
    given, measured = MoEvement(TABLE, size=3), MoEvement(TABLE)
    assert (given.settled, measured.settled) == (True, False)
    assert measured.wanted_sizes(measured.first(0, most=len(TABLE)), FAST) == (1,)


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
    for one in (strategy, joined):
        one.observe(np.where(TABLE.is_expert, np.arange(len(TABLE)) ** 2.0, 0.0))
    old, new = (one.propose(now, (2,)) for one in (strategy, joined))
    assert old.reorders == new.reorders
    assert [schedule.id for schedule in old.schedules] == [schedule.id for schedule in new.schedules]
