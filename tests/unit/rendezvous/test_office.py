"""Offices of coordinators: at most one process decides, whatever supervisors obey and whoever is silent."""

from __future__ import annotations

from itertools import product

import pytest

from moevement_core.rendezvous.office import FIRST_TERM, Office, Term

OWN, STANDBY = "a:1", "b:2"
LEASE_S = 10.0
FIRST = Term(1, OWN)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def office(voters: int, clock: Clock | None = None) -> Office:
    held = Office(FIRST, clock or Clock())
    held.begin_with(STANDBY, held._clock(), names(voters), 0)
    return held


def names(count: int) -> list[str]:
    return [f"task {number}" for number in range(count)]


@pytest.mark.parametrize("voters", range(1, 6))
def test_the_standby_and_a_coordinator_without_it_never_both_have_enough_supervisors(voters: int) -> None:
    for obeyed in product((OWN, STANDBY, None), repeat=voters):
        held = office(voters)
        held.drop()
        for name, owner in zip(names(voters), obeyed, strict=True):
            held.heard(name, Term(2, owner) if owner == OWN else FIRST)
        is_without = not held.standby
        is_elected = 2 * obeyed.count(STANDBY) > voters
        assert not (is_without and is_elected)
        if None not in obeyed:
            assert is_without or is_elected, "one of the two, if all answer"


def test_a_coordinator_decides_only_while_its_standby_hears_it() -> None:
    clock = Clock()
    held = office(3, clock)
    assert held.has(LEASE_S)
    clock.now += LEASE_S - 1
    assert held.has(LEASE_S)
    assert held.misses_standby(LEASE_S, since=0.0)
    held.answered(sent_at=clock.now - 4, number=0)
    assert not held.misses_standby(LEASE_S, since=0.0)
    clock.now += LEASE_S - 4
    assert not held.has(LEASE_S), "counted from the time at which it sent the message that was answered"
    assert Office(FIRST, clock).has(LEASE_S), "without a standby nobody can take over"


def test_a_coordinator_that_was_suspended_does_not_miss_its_standby() -> None:
    clock = Clock()
    held = office(1, clock)
    clock.now += 3 * LEASE_S
    assert not held.misses_standby(LEASE_S, since=clock.now - 1)
    assert not held.has(LEASE_S)


def test_half_of_every_list_that_the_standby_may_know_has_to_agree() -> None:
    held = office(2)
    held.offer(["task 0", "task 1", "task 2", "task 3"], 5)
    held.drop()
    held.heard("task 0", held.term)
    assert held.standby == STANDBY
    held.heard("task 2", held.term)
    assert held.standby == ""
    held = office(2)
    held.offer(["task 2"], 5)
    held.answered(held._clock(), 5)
    held.drop()
    held.heard("task 2", held.term)
    assert held.standby == "", "the older list does not count once the standby has the newer one"


def test_a_newer_term_deposes_and_a_foreign_one_with_the_same_number_is_replaced() -> None:
    held = Office(FIRST)
    held.heard("task 0", FIRST_TERM)
    assert (held.term, held.is_deposed) == (FIRST, False)
    held.heard("task 0", Term(1, "c:3"))
    assert held.term == Term(2, OWN), "so that this supervisor obeys, too"
    held.heard("task 0", Term(3, STANDBY))
    assert held.is_deposed
    assert not held.has(LEASE_S)


def test_a_coordinator_resigns_only_for_its_own_standby() -> None:
    held = office(3)
    assert not held.resigns_for(FIRST)
    assert not held.resigns_for(Term(2, "c:3"))
    held.drop()
    assert held.resigns_for(Term(2, STANDBY)), "the supervisors are divided between the two"
    assert not Office(FIRST).resigns_for(Term(2, STANDBY))


def test_a_standby_whose_process_has_ended_needs_no_agreement() -> None:
    held = office(5)
    held.drop()
    held.standby_has_ended()
    assert held.has(LEASE_S)
    assert not held.is_dropping


def test_a_term_in_a_message_is_checked() -> None:
    assert Term.decode(FIRST.encode()) == FIRST
    for wrong in ([1], ["x", "y"], None, 3):
        with pytest.raises((ValueError, TypeError)):
            Term.decode(wrong)
