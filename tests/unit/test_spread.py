"""The rate at which copies leave follows what comes and how long sends take."""

from __future__ import annotations

import math

import pytest

from moevement_core.replication.spread import CATCH_UP, LEAST, MEASURED_BYTES, MOST, WAITING, Spread

NEEDED = 10e6


def spread(window: int = 1) -> Spread:
    made = Spread()
    made.needed_bytes_per_s, made.usual_backlog = NEEDED, window
    return made


def settled(link: float, sends: int = 200) -> float:
    """Return the rate after many sends of 10 MB over a link of so many bytes a second."""
    made, nbytes = spread(), 10_000_000
    for _ in range(sends):
        rate = made.bytes_per_s(0)
        made.sent(nbytes, nbytes / min(rate, link), rate)
    return made.bytes_per_s(0)


def test_nothing_is_paced_before_it_is_known_what_comes() -> None:
    assert math.isinf(Spread().bytes_per_s(0))


def test_a_quick_link_has_a_snapshot_in_a_quarter_of_its_time() -> None:
    assert settled(link=1e9) == pytest.approx(NEEDED / LEAST)


@pytest.mark.parametrize("link", [1.5 * NEEDED, 2 * NEEDED, 3 * NEEDED])
def test_the_rate_stays_about_what_the_link_carries(link: float) -> None:
    assert NEEDED / MOST <= settled(link) <= 2 * link


def test_a_link_that_carries_too_little_is_asked_for_no_less_than_is_needed() -> None:
    assert settled(link=NEEDED / 10) == pytest.approx(NEEDED / MOST)


def test_a_link_that_halves_and_comes_back_is_followed() -> None:
    made, nbytes = spread(), 10_000_000
    rates = []
    for link in [1e9] * 50 + [1.6 * NEEDED] * 50 + [1e9] * 100:
        rate = made.bytes_per_s(0)
        made.sent(nbytes, nbytes / min(rate, link), rate)
        rates.append(rate)
    assert rates[49] == pytest.approx(NEEDED / LEAST)
    assert max(rates[60:100]) < 2 * 1.6 * NEEDED
    assert rates[-1] == pytest.approx(NEEDED / LEAST)


def test_who_has_fallen_behind_sends_at_twice_the_rate() -> None:
    made = spread(window=3)
    assert made.bytes_per_s(4) == CATCH_UP * made.bytes_per_s(3)


def test_what_the_kernel_takes_at_once_says_nothing() -> None:
    made = spread()
    made.sent(MEASURED_BYTES - 1, 100.0, NEEDED)
    made.sent(10 * MEASURED_BYTES, 100.0, math.inf)
    assert made.bytes_per_s(0) == NEEDED / LEAST


def test_training_goes_first_until_the_send_would_be_late() -> None:
    made, nbytes = spread(), 10_000_000
    assert made.may_wait(nbytes, nbytes, 0.0)
    assert made.may_wait(nbytes, nbytes, 0.2)  # a quarter of a second is enough for all of it
    assert not made.may_wait(nbytes, nbytes, 0.3)
    assert made.may_wait(nbytes // 10, nbytes, 0.4)
    assert not made.may_wait(0, nbytes, WAITING + 0.01)
    assert not Spread().may_wait(0, nbytes, 0.0)
