"""MoC-System's model of overhead: equations by hand, and the conditions under which smaller checkpoints cost less."""

from __future__ import annotations

import pytest

from benchmarks.papers.fault_overhead import Faults, saving_s

FAULTS = Faults(rate=0.001, restart_s=60.0, iteration_s=2.0)


def test_passes_hide_a_snapshot() -> None:
    assert (saving_s(3.0, 2.0), saving_s(1.0, 2.0)) == (1.0, 0.0)


def test_equation_4_by_hand() -> None:
    """Check 1,000 iterations with a checkpoint every 10: 100 checkpoints, and one failure that loses 5 iterations."""
    assert FAULTS.expected(1000) == 1.0
    assert FAULTS.total_s(0.5, 10, 1000) == pytest.approx(100 * 0.5 + 1 * (60 + 5 * 2))


@pytest.mark.parametrize("cost_s", [0.0, 0.01, 0.5, 20.0])
def test_no_interval_costs_less_than_the_best(cost_s: float) -> None:
    best = FAULTS.total_s(cost_s, FAULTS.best_interval(cost_s), 1000)
    assert all(FAULTS.total_s(cost_s, interval, 1000) >= best for interval in range(1, 500))


@pytest.mark.parametrize("interval", [1, 5, 20, 100])
def test_equation_16_compares_totals(interval: int) -> None:
    for full_interval in (1, 10, 40):
        is_less = FAULTS.total_s(0.1, interval, 1000) < FAULTS.total_s(0.8, full_interval, 1000)
        assert FAULTS.is_cheaper(0.1, interval, 0.8, full_interval) == is_less


def test_both_ways_to_use_smaller_checkpoints_cost_less() -> None:
    """Check section 6.2.5: with the same interval, and with the same ratio of saving to interval."""
    full_s, partial_s, full = 0.8, 0.1, 40
    assert FAULTS.is_cheaper(partial_s, full, full_s, full)
    assert FAULTS.is_cheaper(partial_s, int(full * partial_s / full_s), full_s, full)
