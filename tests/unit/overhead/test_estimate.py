"""Estimate of the cost of saving, checked on series of iterations whose cost is known."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from moevement_core.overhead.estimate import ITERATIONS, RECENT, Overhead, OverheadEstimate, Timed, median_interval
from moevement_core.overhead.quiet import is_quiet

QUIET_S = 0.2


def saving_share(iterations: int) -> float:
    """Return the share of the newest iterations that are not quiet."""
    newest = range(max(1, iterations - ITERATIONS + 1), iterations + 1)
    return sum(not is_quiet(iteration, 0) for iteration in newest) / len(newest)


def estimated(
    iterations: int,
    cost: Callable[[int], float],
    *,
    speed: Callable[[int], float] = lambda iteration: 1.0,
    noise: float = 0.0,
    copy_s: float = 0.0,
    stall_s: float = 0.0,
    seed: int = 0,
) -> Overhead:
    """Return the estimate of a job whose iterations take ``QUIET_S``, and longer by the share ``cost`` while it saves.

    Args:
        iterations: number of iterations of the job.
        cost: function of an iteration's number. It returns the cost of saving, as a share of the quiet time.
        speed: function of an iteration's number. It returns the factor by which the machine lengthens the iteration.
        noise: standard deviation of an iteration's time, as a share.
        copy_s: seconds for which the training thread issues copies in each iteration.
        stall_s: seconds for which training waits for copies in each iteration.
        seed: seed of the noise.
    """
    draw, estimate = Random(seed), OverheadEstimate()
    for iteration in range(1, iterations + 1):
        quiet = is_quiet(iteration, 0)
        train_s = QUIET_S * speed(iteration) * (1 + (0.0 if quiet else cost(iteration))) * draw.lognormvariate(0, noise)
        estimate.add(Timed(iteration, train_s, copy_s, 0.0, stall_s, 0.01, 0.03, quiet))
    measured = estimate.measured()
    assert measured is not None
    return measured


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("iterations", [60, 300, 1000])
def test_a_known_cost_is_found_without_noise(cost: float, iterations: int) -> None:
    measured = estimated(iterations, lambda iteration: cost)
    saving = saving_share(iterations)
    assert measured.share == pytest.approx(saving * cost)
    assert measured.low == pytest.approx(saving * cost)
    assert measured.high == pytest.approx(saving * cost)
    assert measured.quiet_s == pytest.approx(QUIET_S)
    assert measured.digest == pytest.approx(measured.share / 4), "in proportion to processor time"
    assert measured.send == pytest.approx(measured.share * 3 / 4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cost", [0.0, 0.2, 0.5])
def test_a_known_cost_is_found_under_noise_and_drift(cost: float, seed: int) -> None:
    """Check a machine that becomes twice as slow while the job runs, with iterations that vary by a tenth."""
    measured = estimated(
        1200, lambda iteration: cost, speed=lambda iteration: 1 + iteration / 1200, noise=0.1, seed=seed
    )
    wanted = cost * (saving_share(1200))
    assert measured.share == pytest.approx(wanted, abs=0.04 + 0.1 * wanted)
    assert measured.low is not None
    assert measured.high is not None
    assert measured.low <= measured.share <= measured.high
    assert measured.low - 0.03 <= wanted <= measured.high + 0.03


def test_a_step_in_speed_does_not_count_as_cost() -> None:
    measured = estimated(600, lambda iteration: 0.0, speed=lambda iteration: 1.0 if iteration < 400 else 2.0)
    assert measured.share == pytest.approx(0.0, abs=1e-9)


def test_what_the_training_thread_does_is_counted_in_quiet_iterations_too() -> None:
    measured = estimated(300, lambda iteration: 0.1, copy_s=0.01, stall_s=0.004)
    assert measured.copy == pytest.approx(0.05)
    assert measured.stall == pytest.approx(0.02)
    parts = measured.copy + measured.digest + measured.send + measured.policy + measured.stall
    assert measured.share == pytest.approx(parts)


def test_an_iteration_with_something_else_beside_it_does_not_count() -> None:
    """Check a dense save every 20 iterations that takes ten times as long as an iteration."""
    measured = estimated(600, lambda iteration: 0.1 if iteration % 20 else 10.0)
    assert measured.share == pytest.approx(0.1 * saving_share(600))


@pytest.mark.parametrize("factor", [1.5, 4.0, 20.0])
@pytest.mark.parametrize("interval", [5, 10, 40])
def test_the_cost_of_rare_snapshots_is_that_of_their_iterations(interval: int, factor: float) -> None:
    """Check a job that saves everything in one of ``interval`` iterations; all others are quiet."""
    estimate = OverheadEstimate()
    for iteration in range(1, 400):
        saves = iteration % interval == 0
        estimate.add(
            Timed(iteration, QUIET_S * (factor if saves else 1.0), 0.0, 0.0, 0.0, 0.0, 0.01, is_quiet=not saves)
        )
    measured, evidence = estimate.measured(), estimate.evidence()
    assert measured is not None
    assert measured.share == pytest.approx((factor - 1) / interval, rel=0.25)
    assert evidence.share == pytest.approx(measured.share)
    assert measured.quiet_s == pytest.approx(QUIET_S)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_snapshots_that_take_some_iterations_to_leave_are_compared_where_they_begin_and_end(length: int) -> None:
    estimate = OverheadEstimate()
    for iteration in range(1, 121):
        saves = iteration % 30 < length
        estimate.add(Timed(iteration, QUIET_S * (1.5 if saves else 1.0), 0.0, 0.0, 0.0, 0.0, 0.01, is_quiet=not saves))
    measured = estimate.measured()
    assert measured is not None
    assert measured.quiet_iterations >= 4 * min(length, 2) - 2
    assert measured.share == pytest.approx(0.5 * length / 30, rel=0.1)


def test_evidence_has_the_error_of_the_newest_comparisons() -> None:
    draws = Random(1)
    estimate = OverheadEstimate()
    assert estimate.evidence().comparisons == 0
    for iteration in range(1, 240):
        cost = 0.0 if iteration < 100 else 0.4
        quiet = iteration % 4 == 0
        train_s = QUIET_S * (1 + (0.0 if quiet else cost)) * draws.lognormvariate(0, 0.05)
        estimate.add(Timed(iteration, train_s, 0.0, 0.0, 0.0, 0.0, 0.01, quiet))
    evidence = estimate.evidence()
    assert evidence.comparisons == RECENT
    assert 0 < evidence.error < 0.05
    assert abs(evidence.share - 0.3) < 3 * evidence.error


def test_a_gap_begins_a_new_neighbourhood() -> None:
    estimate = OverheadEstimate()
    for iteration in (1, 2, 3, 4, 5, 6, 9, 10):
        estimate.add(Timed(iteration, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, iteration == 6))
    assert estimate.measured() is None
    assert estimate.quiet_s is None


def test_few_quiet_iterations_give_no_interval() -> None:
    measured = estimated(20, lambda iteration: 0.1)
    assert (measured.low, measured.high) == (None, None)
    assert measured.quiet_iterations < 6


@pytest.mark.parametrize(
    ("count", "wanted"), [(1, (None, None)), (5, (None, None)), (6, (0, 5)), (9, (1, 7)), (20, (5, 14))]
)
def test_ends_are_the_order_statistics_of_the_binomial(count: int, wanted: tuple[int | None, int | None]) -> None:
    """Compare with tables for 95%: n = 6 takes the extremes, n = 20 the 6th smallest and the 6th largest value."""
    assert median_interval(list(range(count))) == wanted
