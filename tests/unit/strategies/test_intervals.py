"""Intervals at which CheckFreq and GEMINI save the whole state, chosen from measurements."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moevement_core.errors import WindowError
from moevement_core.overhead.cap import Evidence
from moevement_core.policy.interval import hidden_interval, tuned_interval
from moevement_core.strategies import (
    CheckFreq,
    DenseSchedule,
    DenseToPeers,
    Gemini,
    Measured,
    MoC,
    MoEtion,
    MoEvement,
    Strategy,
)
from moevement_core.strategies.dense import FIRST_INTERVAL
from tests.unit.policy.tables import equal_experts

TABLE = equal_experts(6)
BYTES = int(TABLE.full.sum())


@pytest.mark.parametrize(
    ("checkpoint_s", "overhead_s", "iteration_s", "wanted"),
    [(10.0, 0.0, 3.0, 4), (9.0, 0.0, 3.0, 3), (10.0, 1.0, 3.0, 3), (0.5, 0.0, 3.0, 1), (1.0, 5.0, 3.0, 1)],
)
def test_the_papers_formula(checkpoint_s: float, overhead_s: float, iteration_s: float, wanted: int) -> None:
    assert hidden_interval(checkpoint_s, overhead_s, iteration_s) == wanted


@pytest.mark.parametrize("iteration_s", [0.0, -1.0, math.inf, math.nan])
def test_times_that_cannot_be(iteration_s: float) -> None:
    with pytest.raises(WindowError, match="iteration time"):
        hidden_interval(1.0, 0.0, iteration_s)


def test_an_interval_grows_by_two_while_it_costs_too_much_and_shrinks_where_it_need_not() -> None:
    interval, seen = 3, []
    for _ in range(20):
        interval = tuned_interval(interval, 2, overhead_s=0.5, iteration_s=1.0, cap=0.035)
        seen.append(interval)
    assert seen[:3] == [5, 7, 9]
    assert len(set(seen[-5:])) == 1, "it comes to rest"
    assert 0.035 * seen[-1] * 1.0 >= 0.5, "within the cap"
    assert tuned_interval(40, 2, overhead_s=0.5, iteration_s=1.0, cap=0.035) == 39
    assert tuned_interval(40, 60, overhead_s=0.5, iteration_s=1.0, cap=0.035) == 60, "a checkpoint is durable first"


def test_checkfreq_profiles_and_then_monitors() -> None:
    strategy = CheckFreq(TABLE)
    now = strategy.first(0, most=6)
    measured = Measured(1.0, BYTES / 2.0, 1.0, 0, disk_bytes_per_s=BYTES / 5.0, delay_s=0.5)
    (size,) = strategy.wanted_sizes(now, measured)
    assert size == 7, "two seconds to copy, five to write, of which half a second is seen"
    proposal = strategy.propose(now, (size,))
    assert (proposal.is_change, proposal.schedules[0].size) == (True, 7)
    heir = CheckFreq(TABLE)
    heir.adopt(strategy.learned())
    after = DenseSchedule(TABLE, 7)
    assert strategy.wanted_sizes(after, measured) == heir.wanted_sizes(after, measured) == (9,)
    assert not strategy.settled


def test_gemini_counts_what_is_sent() -> None:
    strategy = Gemini(TABLE, None)
    measured = Measured(1.0, BYTES / 1.0, BYTES / 2.0, 2)
    assert strategy.wanted_sizes(strategy.first(0, most=6), measured) == (5, 1), "one second to copy, four to send"


def test_gemini_chooses_when_it_knows_how_long_sending_has_to_wait() -> None:
    strategy = Gemini(TABLE, None)
    now = strategy.first(0, most=6)
    assert not strategy.propose(now, None).is_change
    assert [strategy.propose(now, (size, window)).is_change for size, window in ((1, 1), (2, 2))] == [False, False]
    new = Gemini(TABLE, None)
    measured = Measured(1.0, BYTES / 1.0, BYTES / 2.0, 2)
    sizes = [gemini.wanted_sizes(now, measured) for gemini in (strategy, new)]
    assert sizes == [(5, 3), (5, 1)], "the largest of each counts on all"
    heir = Gemini(TABLE, None)
    heir.adopt(strategy.learned())
    for gemini in (strategy, heir, new):
        assert not gemini.settled
        assert gemini.propose(now, (7, 3)).schedules[0].size == 7
        assert gemini.settled


def test_gemini_keeps_to_a_cap_that_is_given() -> None:
    strategy = Gemini(TABLE, None, cap=0.02)
    now = DenseSchedule(TABLE, 5)
    measured = Measured(1.0, BYTES / 1.0, BYTES / 2.0, 2, cost=Evidence(0.07, 0.0, 8))
    size, window = strategy.wanted_sizes(now, measured)
    assert (size, window) == (25, 1), "a fifth of the bytes"
    assert strategy.propose(now, (size, 3)).schedules[0].size == 25
    assert not strategy.settled


def test_dense_snapshots_become_rarer_where_they_cost_too_much() -> None:
    strategy = DenseToPeers(TABLE, None)
    now = strategy.first(0, most=6)
    measured = Measured(1.0, BYTES / 1.0, BYTES * 100.0, 2, cost=Evidence(0.07, 0.0, 8))
    assert (strategy.wanted_sizes(now, measured), strategy.wanted_sizes(now, replace(measured, cost=None))) == (
        (5 * FIRST_INTERVAL,), (FIRST_INTERVAL,),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [CheckFreq, Gemini, DenseToPeers])
def test_an_interval_that_was_given_stays(kind: type[CheckFreq | Gemini | DenseToPeers]) -> None:
    strategy = kind(TABLE, 4)
    assert strategy.settled
    assert strategy.first(0, most=6).size == 4


@pytest.mark.parametrize(
    ("strategy", "counts_experts"), [(MoC, True), (MoEtion, True), (MoEvement, False), (DenseToPeers, False)]
)
def test_only_sizes_that_are_iterations_are_bounded_as_windows_are(
    strategy: type[Strategy], counts_experts: bool
) -> None:
    """Bound no size that counts experts, because a layer may have more experts than a window may have iterations."""
    assert strategy.sizes_are_iterations is not counts_experts
