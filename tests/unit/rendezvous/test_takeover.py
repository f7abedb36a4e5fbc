"""Tests of which spare takes over which rank, and of how long the job waits for a starting process."""

from __future__ import annotations

import random

import pytest

from moevement_core.rendezvous import respawns
from moevement_core.rendezvous.respawns import Respawns
from moevement_core.rendezvous.roster import MemberInfo
from moevement_core.rendezvous.takeover import split_blocks, take_over


def waiting(*nodes: str) -> list[MemberInfo]:
    """Return members 100, 101, ... on ``nodes``, in the order in which they joined."""
    return [MemberInfo(100 + number, number, node, node) for number, node in enumerate(nodes)]


BEFORE = dict(enumerate("aaaabbbb"))
"""Node of each of eight ranks before a failure."""


@pytest.mark.parametrize(
    ("missing", "nodes", "block", "avoided", "taken"),
    [
        # A process of the same node, although others joined first.
        ([1], "cca", 1, "", {1: 102}),
        ([1], "cca", 4, "", {1: 102}),
        ([1, 5], "ba", 4, "", {1: 101, 5: 100}),
        ([0, 5], "cb", 1, "", {0: 100, 5: 101}),
        # No process of the same node: the first that joined.
        ([1], "cd", 4, "", {1: 100}),
        # A node is lost: its ranks move together, to the first node with enough processes.
        ([4, 5, 6, 7], "cddccdd", 4, "", {4: 101, 5: 102, 6: 105, 7: 106}),
        ([4, 5, 6, 7], "cddcdbbbb", 4, "", {4: 105, 5: 106, 6: 107, 7: 108}),
        ([4, 5, 6, 7], "cccbd", 4, "", {4: 103, 5: 100, 6: 101, 7: 102}),
        # Two groups on the lost node: each moves to a single node.
        ([4, 5, 6, 7], "cddc", 2, "", {4: 101, 5: 102, 6: 100, 7: 103}),
        # A group with survivors gets a process before a group that is lost as a whole.
        ([0, 1, 2, 3, 4], "bccccb", 4, "", {0: 101, 1: 102, 2: 103, 3: 104, 4: 100}),
        ([2, 4, 5, 6, 7], "abbbba", 4, "", {2: 100, 4: 101, 5: 102, 6: 103, 7: 104}),
        # A node to avoid, which may be lost or compute non-finite results, gets a rank only if no other can.
        ([1], "ac", 1, "a", {1: 100}),
        ([1], "ca", 4, "a", {1: 100}),
        ([1], "a", 4, "a", {1: 100}),
    ],
)
def test_who_takes_over(missing: list[int], nodes: str, block: int, avoided: str, taken: dict[int, int]) -> None:
    kept = {rank: node for rank, node in BEFORE.items() if rank not in missing}
    assert take_over(missing, kept, BEFORE, waiting(*nodes), block, avoided) == taken


def test_a_group_that_spans_nodes_is_replaced_where_each_rank_was() -> None:
    before = dict(enumerate("aabb"))
    kept = {0: "a", 3: "b"}
    assert take_over([1, 2], kept, before, waiting("c", "b", "a"), 4) == {1: 102, 2: 101}


def test_every_rank_gets_a_process_of_its_own_whatever_is_missing() -> None:
    seeded = random.Random(3)
    for _ in range(500):
        block, ranks = seeded.choice([1, 2, 4]), 8
        before = {rank: seeded.choice("abc") for rank in range(ranks)}
        missing = sorted(seeded.sample(range(ranks), seeded.randint(1, ranks)))
        candidates = waiting(*(seeded.choice("abcd") for _ in range(len(missing) + seeded.randrange(4))))
        kept = {rank: node for rank, node in before.items() if rank not in missing}
        taken = take_over(missing, kept, before, candidates, block, seeded.choice(["", "a", "ab"]))
        assert sorted(taken) == missing
        assert len(set(taken.values())) == len(missing)
        assert set(taken.values()) <= {info.member for info in candidates}


def test_which_groups_span_nodes() -> None:
    assert split_blocks(dict(enumerate("aabbab")), 2) == {2}
    assert split_blocks(dict(enumerate("aabbab")), 1) == set()
    assert split_blocks(dict(enumerate("aab")), 2) == set(), "the last one is not whole"


# Processes that start


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_process_is_expected_until_it_is_there_or_should_have_been() -> None:
    clock = Clock()
    tracker = Respawns(clock)
    assert not tracker.is_expected("a")
    tracker.begins("a")
    tracker.begins("a")
    clock.now = respawns.WAIT_S - 1
    assert (tracker.is_expected("a"), tracker.is_expected("b")) == (True, False)
    tracker.has_joined("a")
    assert tracker.is_expected("a"), "two have ended there"
    tracker.has_joined("a")
    assert not tracker.is_expected("a")


def test_starts_that_were_measured_say_how_long_the_next_may_take() -> None:
    clock = Clock()
    tracker = Respawns(clock)
    for seconds in (3.0, 1.0):
        tracker.begins("a")
        clock.now += seconds
        tracker.has_joined("a")
    tracker.begins("b")
    clock.now += 6.9
    assert tracker.is_expected("b"), "twice the slowest, and a second"
    clock.now += 0.2
    assert not tracker.is_expected("b")


def test_nobody_is_expected_where_the_node_is_gone_or_nothing_is_started() -> None:
    clock = Clock()
    tracker, never = Respawns(clock), Respawns(clock, wait_s=0.0)
    for each_tracker in (tracker, never):
        each_tracker.begins("a")
    tracker.are_lost("a")
    assert (tracker.is_expected("a"), never.is_expected("a")) == (False, False)
    tracker.has_joined("a")
    assert not tracker.is_expected("a")


def test_a_node_that_comes_back_much_later_says_nothing_of_how_long_starts_take() -> None:
    clock = Clock()
    tracker = Respawns(clock)
    tracker.begins("a")
    clock.now = 4000.0
    tracker.has_joined("a")
    tracker.begins("a")
    clock.now += respawns.WAIT_S + 1
    assert not tracker.is_expected("a")
