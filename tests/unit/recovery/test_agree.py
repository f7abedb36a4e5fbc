"""Iteration at which a job resumes after each kind of failure that kill tests have found so far."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moevement_core.recovery.agree import (
    ONLY_SNAPSHOTS,
    Distrust,
    NothingToResume,
    RankStatus,
    ResumePoint,
    decide,
    peers_of_followers,
)


def _at(committed: int | None, stage: int, *, begun: bool = True, replica: int = 0) -> RankStatus:
    """Return the status of a rank that trained and last committed iteration ``committed``."""
    return RankStatus(stage, replica, was_training=True, committed=committed, has_begun_next=begun)


def _new(stage: int, replica: int = 0) -> RankStatus:
    return RankStatus(stage, replica)


def _point(iteration: int, lost: set[int], **fields: object) -> ResumePoint:
    return replace(
        ResumePoint(iteration, frozenset(), frozenset(lost), frozenset(), 0, reference_is_goal=False, is_between=True),
        **fields,  # type: ignore[arg-type]
    )


CASES = {
    "a rank is killed in an iteration": (
        [_at(7, 0), _at(7, 1), _new(2), _at(7, 3)],
        _point(7, {2}, is_between=False),
    ),
    "the last rank is killed, which alone knows whether what was due was done": (
        [_at(7, 0), _at(7, 1), _at(7, 2), _new(3)],
        _point(7, {3}),
    ),
    "some ranks have not begun the next iteration, so an evaluation may be half done": (
        [_new(0), _at(7, 1, begun=False), _at(7, 2), _at(7, 3)],
        _point(7, {0}, reference=1),
    ),
    "a rank is killed after its update, before the others have made theirs": (
        [_at(7, 0), _at(8, 1, begun=False), _new(2), _at(7, 3)],
        _point(8, {2}, reference=1, followers=frozenset({0, 3})),
    ),
    "who is behind follows in a stage that lost a rank, too: maybe it is only that rank that is restored": (
        [_at(7, 0), _new(0), _at(8, 1, begun=False), _at(8, 1, begun=False)],
        _point(8, {0}, reference=2, followers=frozenset({0})),
    ),
    "an update is torn: its rank has no state, and took part": (
        [_at(None, 0), _at(7, 1)],
        _point(7, {0}, reference=1, is_between=False),
    ),
    "one of the ranks has not learned what all of them had agreed on": (
        [replace(_at(7, 0), persisted=3), _new(1), replace(_at(7, 2), persisted=6)],
        _point(7, {1}, is_between=False, persisted=6),
    ),
    "nobody has lost anything": ([_at(7, 0), _at(7, 1)], _point(7, set(), is_between=False)),
    "two stages at once": ([_at(7, 0), _new(1), _at(7, 2), _new(3)], _point(7, {1, 3})),
    "a further failure, of a rank that kept its state, while another was on its way back": (
        [_new(0), replace(_at(None, 1), goal=_at(9, 0))],
        _point(9, {0, 1}, reference=1, reference_is_goal=True),
    ),
    "a goal is not newer than what is there": (
        [_at(9, 0), replace(_at(None, 1), goal=_at(9, 0))],
        _point(9, {1}, is_between=False),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_failure(name: str) -> None:
    statuses, expected = CASES[name]
    statuses = [*statuses[:-1], replace(statuses[-1], is_last=statuses[-1].was_training)]
    lost = frozenset(rank for rank, status in enumerate(statuses) if status.committed is None)
    assert decide(statuses) == replace(expected, lost_ranks=lost)


def test_a_job_that_lost_its_last_rank_for_good_goes_by_the_rank_that_was_last() -> None:
    """Check that the evaluation of an elastic job is done only if the rank that prints its results still lives."""
    others = [_at(7, 0), _at(7, 0)]
    assert decide(others).is_between
    assert not decide([others[0], replace(others[1], is_last=True), _new(0)]).is_between


def test_copies_of_state_cannot_follow_and_old_starts_do_not_count() -> None:
    """Check the states that a process of an elastic job may have from a time when it was not yet a spare."""
    new = replace(_at(8, 1, begun=False), start=1, began_at=None)
    copy = replace(_at(7, 0), start=1, may_follow=False)
    point = decide([copy, new, replace(_at(9, 0), start=0)])
    assert (point.iteration, point.followers, point.lost_ranks) == (8, frozenset(), {0, 2})
    assert decide([replace(_at(8, 0), began_at=None)]).iteration == 8


def test_a_former_spare_has_state_of_the_history_only_up_to_the_new_formation() -> None:
    """Check the former spares of a job that went on from iteration 20 with other ranks, in generation 5."""
    now = replace(_at(21, 0), formation=5, formed_at=20, began_at=None)
    before = replace(_at(20, 0), formation=3, began_at=None, is_last=True)
    point = decide([now, before, replace(before, committed=21)])
    assert (point.iteration, point.followers, point.lost_ranks) == (21, frozenset(), {1, 2})
    assert point.is_between
    as_new = replace(now, committed=20)
    assert decide([as_new, before, replace(before, committed=21)]).lost_ranks == {2}


def test_an_elastic_job_of_which_each_update_was_torn_goes_back_to_snapshots() -> None:
    torn = replace(_at(None, 1), began_at=None)
    point = decide([_new(0), torn])
    assert (point.iteration, point.reference, point.lost_ranks) == (ONLY_SNAPSHOTS, 1, {0, 1})


def test_after_corruption_no_state_of_a_distrusted_iteration_counts() -> None:
    """Let rank 1 learn nothing of the verdict, and have the newest iteration; rank 0 is replaced."""
    distrusting = replace(_at(None, 0), distrust=Distrust(9, 6), goal=_at(9, 0))
    point = decide([_new(0), _at(10, 0), distrusting, replace(distrusting, stage=1)])
    assert (point.iteration, point.lost_ranks, point.clean_at) == (9, {0, 1, 2, 3}, 6)
    assert (point.reference, point.reference_is_goal, point.followers) == (2, True, frozenset())
    recovered = decide([_at(9, 0), distrusting])
    assert (recovered.iteration, recovered.lost_ranks, recovered.clean_at) == (9, {0, 1}, 6)
    assert decide([_new(0), _at(10, 0)]).clean_at is None
    with pytest.raises(NothingToResume):
        decide([replace(distrusting, goal=None), _at(10, 0)])


def test_one_rank_that_knows_of_a_roll_back_is_enough() -> None:
    statuses = [_at(7, 0), replace(_at(7, 1), rolls_back="spiked"), _new(2)]
    with pytest.raises(NothingToResume, match="spiked"):
        decide(statuses)
    former_spare = replace(_at(5, 0), rolls_back="spiked")  # of the job's first start
    resumed = [replace(_at(7, 0), start=1), replace(_at(7, 1), start=1), former_spare]
    assert decide(resumed).iteration == 7


def test_nobody_follows_a_peer_of_an_earlier_start() -> None:
    old = replace(_at(8, 0), start=0)
    statuses = [old, replace(_at(7, 0), start=1), replace(_at(8, 1, begun=False, replica=1), start=1)]
    assert peers_of_followers(statuses, decide(statuses)) == {1: None}


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        ([_new(0), _new(1)], r"\bno rank\b"),
        ([_at(0, 0), _new(1)], r"\bcommitted\b"),
        ([_at(None, 0), _new(1)], r"\bcommitted\b"),
        ([replace(_at(40, 0), began_at=40), _new(1)], r"\bcommitted\b"),
    ],
)
def test_where_there_is_nothing_to_resume_the_job_restarts(statuses: list[RankStatus], why: str) -> None:
    with pytest.raises(NothingToResume, match=why):
        decide(statuses)


def test_who_follows_goes_by_a_rank_of_its_own_replica_where_one_is_left() -> None:
    """Check that a follower follows a rank of its own replica, because replicas may clip by different norms."""
    statuses = [
        _at(7, 0, replica=0), _at(7, 0, replica=1),
        _at(8, 1, begun=False, replica=0), _at(8, 1, begun=False, replica=1),
    ]  # fmt: skip
    point = decide(statuses)
    assert point.followers == {0, 1}
    assert peers_of_followers(statuses, point) == {0: 2, 1: 3}
    alone = [*statuses[:3], _new(1, replica=1)]
    assert peers_of_followers(alone, decide(alone)) == {0: 2, 1: None}
