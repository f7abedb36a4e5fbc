"""Slow ranks are named once, as a rank or as a node, until they are as fast as their peers again."""

from __future__ import annotations

from collections.abc import Mapping

from moevement_core.speed.compare import SENDING, Slowness
from moevement_core.speed.findings import Findings, SlowRanks
from moevement_core.speed.phases import PHASES

NODES = ["n0", "n0", "n1", "n1"]
PIDS = [100, 101, 102, 103]


def compared(**factors: float) -> dict[int, Slowness]:
    """Return comparisons of four ranks; ``r1=1.5`` lets rank 1 take 1.5 times as long as its peers, in each block."""
    return {rank: Slowness(PHASES[0], factors.get(f"r{rank}", 1.0), factors.get(f"r{rank}", 1.0)) for rank in range(4)}


def find(slow: SlowRanks, links: Mapping[int, Slowness] | None = None, /, **factors: float) -> Findings:
    findings = slow.find(compared(**factors), links or {}, NODES, PIDS)
    assert Findings.decode(findings.encode()) == findings
    return findings


def test_a_slow_rank_is_named_once() -> None:
    slow = SlowRanks(1.2)
    assert find(slow).new == ()
    (place,) = find(slow, r2=1.5).new
    assert (place.ranks, place.node, place.is_node, place.pid) == ((2,), "n1", False, 102)
    assert (place.phase, place.factor) == (PHASES[0], 1.5)
    again = find(slow, r2=1.6)
    assert (again.new, again.over, again.slowest) == ((), (), (2, 1.6))


def test_a_rank_is_fast_again_only_well_below_the_threshold() -> None:
    slow = SlowRanks(1.2)
    find(slow, r2=1.5)
    assert find(slow, r2=1.15).over == ()
    (place,) = find(slow, r2=1.05).over
    assert place.ranks == (2,)
    assert len(find(slow, r2=1.5).new) == 1, "it is named again"


def test_a_node_whose_ranks_are_all_slow_is_named_in_place_of_its_ranks() -> None:
    (place,) = find(SlowRanks(1.2), r2=1.5, r3=1.4).new
    assert (place.ranks, place.node, place.is_node, place.factor) == ((2, 3), "n1", True, 1.5)


def test_two_ranks_of_different_nodes_are_named_each() -> None:
    assert [place.ranks for place in find(SlowRanks(1.2), r1=1.5, r2=1.5).new] == [(1,), (2,)]


def test_one_slow_block_of_iterations_is_not_enough() -> None:
    paused = {**compared(), 1: Slowness(PHASES[0], 3.0, 1.1)}
    assert SlowRanks(1.2).find(paused, {}, NODES, PIDS).new == ()


def test_a_node_with_slow_links_is_named_after_two_comparisons() -> None:
    slow, links = SlowRanks(1.2), {2: Slowness(SENDING, 9.0, 9.0), 3: Slowness(SENDING, 9.0, 9.0)}
    assert find(slow, links).new == ()
    (place,) = find(slow, links).new
    assert (place.phase, place.ranks, place.is_node) == (SENDING, (2, 3), True)
    assert find(slow, links).new == ()
    (over,) = find(slow).over
    assert over == place


def test_after_a_failure_a_place_that_is_still_slow_is_named_again() -> None:
    slow = SlowRanks(1.2)
    find(slow, r2=1.5)
    slow.forget()
    assert len(find(slow, r2=1.5).new) == 1


def test_a_rank_that_has_not_been_timed_yet_stays_slow() -> None:
    slow = SlowRanks(1.2)
    find(slow, r2=1.5)
    assert slow.find({}, {}, NODES, PIDS).over == ()
