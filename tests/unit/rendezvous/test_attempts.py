"""Tests of when the coordinator gives up a job that fails repeatedly."""

from __future__ import annotations

import re

from moevement_core.rendezvous.attempts import DEATHS, FAILURES, Attempts


def test_a_rank_that_dies_in_one_iteration_again_and_again_ends_the_job() -> None:
    attempts = Attempts()
    attempts.committed(46)
    reasons = [attempts.failed(generation, [1], []) for generation in range(DEATHS)]
    assert reasons[:-1] == [None] * (DEATHS - 1)
    assert re.search(rf"\brank 1\b.*\b{DEATHS} times\b.*\biteration 47\b.*--iterations-to-skip 47\b", str(reasons[-1]))


def test_ranks_that_die_while_they_wait_died_in_no_iteration() -> None:
    attempts = Attempts()
    attempts.committed(46)
    for generation in range(DEATHS - 1):
        assert attempts.failed(generation, [generation % 3], []) is None
        for _ in range(2 * DEATHS):
            assert attempts.failed(generation, [1], []) is None


def test_an_attempt_that_began_from_an_older_window_died_where_it_was() -> None:
    attempts = Attempts()
    attempts.committed(21)
    for generation in range(3 * DEATHS):
        assert attempts.failed(generation, [3], []) is None
        attempts.formed()
        attempts.committed(16 + generation % 4)  # each attempt reaches another iteration
    reasons = []
    for generation in range(100, 100 + DEATHS):
        attempts.formed()
        attempts.committed(21)
        reasons.append(attempts.failed(generation, [3], []))
    assert any("iteration 22" in str(reason) for reason in reasons)


def test_an_iteration_that_is_committed_starts_the_count_anew() -> None:
    attempts = Attempts()
    for iteration in range(3 * DEATHS):
        attempts.committed(iteration)
        assert attempts.failed(iteration, [1], []) is None
        assert attempts.back_off_s == 0.0


def test_a_failure_without_a_death_is_given_up_sooner() -> None:
    attempts, reason = Attempts(), "rank 0: ValueError: no"
    reasons = [attempts.failed(generation, [], [reason]) for generation in range(FAILURES)]
    assert reasons[:-1] == [None] * (FAILURES - 1)
    assert reason in str(reasons[-1])


def test_it_waits_longer_and_longer() -> None:
    attempts, waits = Attempts(), list[float]()
    for generation in range(12):
        attempts.failed(generation, [generation % 4], [])
        waits.append(attempts.back_off_s)
    assert waits[:2] == [0.0, 0.0]
    assert waits == sorted(waits)
    assert waits[-1] == 30.0


def test_the_first_error_is_named_beside_the_last_one() -> None:
    """Let every recovery fail for a reason that only the first error explains."""
    attempts = Attempts()
    reasons = [attempts.failed(generation, [], [f"error {generation}"]) for generation in range(FAILURES)]
    assert re.search(rf"\berror 0\b.*\berror {FAILURES - 1}\b", str(reasons[-1]))
