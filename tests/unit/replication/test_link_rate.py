"""Rates of links, estimated from the bytes that senders have delivered."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moevement_core.replication.link_rate import LinkRate
from moevement_core.replication.spread import Spread

NEEDED = 8e6


class OfferedState:
    """Stand-in for a sender, with nothing but its counters."""

    def __init__(self, *, is_awaited: bool = True) -> None:
        self.sent_bytes, self.send_s, self.spread, self.is_awaited = 0, 0.0, Spread(), is_awaited

    def brings(self, nbytes: int, seconds: float) -> None:
        self.sent_bytes += nbytes
        self.send_s += seconds


def taken(rate: LinkRate, *senders: Any) -> float:
    return rate.take(senders, NEEDED)


def test_rates_of_all_peers_add_up_and_old_sends_do_not_count() -> None:
    rate, first, second = LinkRate(), OfferedState(), OfferedState()
    for sender, nbytes in ((first, 10_000_000), (second, 30_000_000)):
        sender.brings(nbytes, 2.0)
    assert taken(rate, first, second) == pytest.approx(20e6)
    for sender in (first, second):
        sender.brings(1_000_000, 1.0)
    assert taken(rate, first, second) == pytest.approx(20e6), "slow sends may be spread over time"
    for sender in (first, second):
        sender.brings(1_000_000, 1.0)
        sender.spread.sent(1_000_000, 1.0, 5e6)
    assert taken(rate, first, second) == pytest.approx(2e6), "the link has become slower"


def test_a_peer_that_never_acknowledges_halves_the_rate_each_time() -> None:
    rate, silent = LinkRate(), OfferedState()
    assert [taken(rate, silent) for _ in range(3)] == [NEEDED / 2, NEEDED / 4, NEEDED / 8]


def test_one_silent_peer_of_two_is_enough_and_its_first_answer_ends_that() -> None:
    rate, quick, silent = LinkRate(), OfferedState(), OfferedState()
    for _ in range(2):
        quick.brings(10_000_000, 1.0)
        estimate = taken(rate, quick, silent)
    assert estimate == NEEDED / 4
    quick.brings(10_000_000, 1.0)
    silent.brings(1_000_000, 1.0)
    assert taken(rate, quick, silent) == pytest.approx(11e6)


def test_without_peers_nothing_limits() -> None:
    assert math.isinf(taken(LinkRate()))


def test_sends_of_another_generation_that_are_spread_over_time_do_not_make_its_links_slower() -> None:
    rate, old, new = LinkRate(), OfferedState(), OfferedState()
    old.brings(10_000_000, 1.0)
    taken(rate, old)
    new.brings(3_000_000, 1.0)
    assert taken(rate, new) == pytest.approx(10e6)
    new.brings(3_000_000, 1.0)
    new.spread.sent(3_000_000, 1.0, 9e6)
    assert taken(rate, new) == pytest.approx(3e6), "a sender has learned that its link is slower"


def test_what_senders_have_learned_of_their_link_counts_and_not_how_slowly_they_were_to_send() -> None:
    rate, sender = LinkRate(), OfferedState()
    sender.spread.link_bytes_per_s = 50e6
    sender.brings(10_000_000, 1.0)
    assert taken(rate, sender) == pytest.approx(50e6)


def test_a_peer_to_which_nothing_was_sent_is_not_silent() -> None:
    rate, old = LinkRate(), OfferedState()
    assert math.isinf(taken(rate, OfferedState(is_awaited=False)))
    old.brings(10_000_000, 1.0)
    taken(rate, old)
    new = [OfferedState(is_awaited=False) for _ in range(2)]
    assert [taken(rate, *new) for _ in range(3)] == [10e6] * 3, "a failure does not make links slower"
    new[0].brings(8_000_000, 1.0)
    assert taken(rate, *new) == pytest.approx(16e6)
    new[1].is_awaited = True
    assert taken(rate, *new) == pytest.approx(NEEDED / 2)


def test_a_new_peer_has_time_to_answer() -> None:
    rate, old = LinkRate(), OfferedState()
    old.brings(10_000_000, 1.0)
    taken(rate, old)
    new = OfferedState()
    assert [taken(rate, new) for _ in range(2)] == [10e6, NEEDED / 2]
