"""The rate at which copies leave follows the rate of new copies and the measured bandwidth of the link."""

from __future__ import annotations

import math

import pytest

from moevement_core.replication.spread import (
    CATCH_UP,
    LINK_SHARE,
    MEASURED_BYTES,
    TIME_SHARE,
    TRIED_EVERY,
    Spread,
)

NEEDED = 10e6
NBYTES = 10_000_000


def spread(window: int = 1) -> Spread:
    pacing = Spread()
    pacing.needed_bytes_per_s, pacing.usual_backlog = NEEDED, window
    return pacing


def send_over(pacing: Spread, link: float, sends: int) -> list[float]:
    """Return the rates of ``sends`` sends of 10 MB each over a link of ``link`` bytes per second."""
    rates = []
    for _ in range(sends):
        rates.append(pacing.bytes_per_s(0))
        pacing.sent(NBYTES, NBYTES / min(rates[-1], link), rates[-1])
    return rates


def test_nothing_is_paced_before_it_is_known_what_comes() -> None:
    assert math.isinf(Spread().bytes_per_s(0))


def test_sends_as_fast_as_they_can_be_show_what_the_link_carries() -> None:
    pacing = Spread()
    send_over(pacing, 50e6, 3)
    assert pacing.link_bytes_per_s == pytest.approx(50e6)


def test_a_link_that_is_not_known_yet_is_asked_for_what_is_needed() -> None:
    assert spread().bytes_per_s(0) == NEEDED / TIME_SHARE


@pytest.mark.parametrize("link", [4 * NEEDED, 100 * NEEDED])
def test_a_quick_link_is_used_in_part_and_not_filled(link: float) -> None:
    pacing = Spread()
    send_over(pacing, link, 1)
    pacing.needed_bytes_per_s = NEEDED
    assert pacing.bytes_per_s(0) == pytest.approx(LINK_SHARE * link)
    rates = send_over(pacing, link, 10 * TRIED_EVERY)
    assert sum(map(math.isinf, rates)) == 10, "one in so many tries the link"
    assert [rate for rate in rates if math.isfinite(rate)] == pytest.approx([LINK_SHARE * link] * (len(rates) - 10))


def test_a_link_that_carries_too_little_is_asked_for_no_less_than_is_needed() -> None:
    rates = send_over(spread(), NEEDED / 10, TRIED_EVERY - 1)
    assert rates == pytest.approx([NEEDED / TIME_SHARE] * (TRIED_EVERY - 1))


def test_a_link_that_halves_and_comes_back_is_followed() -> None:
    pacing = Spread()
    send_over(pacing, 80e6, 1)
    pacing.needed_bytes_per_s = NEEDED
    assert LINK_SHARE * 80e6 < 40e6, "half of the link still carries that, and nobody notices"
    for link in (40e6, 80e6, 20e6):
        send_over(pacing, link, TRIED_EVERY)
        assert pacing.link_bytes_per_s == pytest.approx(link)


def test_who_has_fallen_behind_sends_at_twice_the_rate() -> None:
    pacing = spread(window=3)
    assert pacing.bytes_per_s(4) == CATCH_UP * pacing.bytes_per_s(3)


def test_short_sends_say_nothing() -> None:
    pacing = spread()
    pacing.sent(MEASURED_BYTES - 1, 100.0, math.inf)
    assert math.isinf(pacing.link_bytes_per_s)
