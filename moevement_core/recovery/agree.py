"""Which iteration a job goes on from after a failure, and what each rank has to do for it (DESIGN section 8).

Every rank decides for itself, from what all ranks reported, and so all come to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports of its training state when ranks meet after a failure."""

    stage: int
    """Of the pipeline."""
    replica: int
    """The model replica that it belongs to: ranks of one replica clip by the same norm."""
    was_training: bool = False
    """Whether it took part before the failure; a replacement did not."""
    began_at: int = 0
    """The iteration that the job started from."""
    committed: int | None = None
    """The last iteration that it committed; None: it has no state of any iteration."""
    has_begun_next: bool = False
    """Whether it had begun the iteration after that, so that everything due in between had been done."""
    goal: RankStatus | None = None
    """Of a rank that had committed the iteration which this one was on its way back to when a further failure came."""


@dataclass(frozen=True)
class ResumePoint:
    """Where the job goes on, the same for every rank."""

    iteration: int
    """The newest that any rank is known to have committed."""
    lost_ranks: frozenset[int]
    """Ranks that have no state."""
    lost_stages: frozenset[int]
    """Their pipeline stages. Other stages keep their state."""
    followers: frozenset[int]
    """Ranks one update behind. They had contributed to its last reduction, so they make it without their peers."""
    reference: int
    """The rank whose record of the iteration all go by."""
    reference_is_goal: bool
    """Whether that is the record of who had committed it before, which the rank only remembers."""
    is_between: bool
    """Whether what is due after the iteration (evaluation, dense save) may not have been done."""


class NothingToResume(Exception):
    """No iteration can be resumed from: the job restarts. The message says why."""


def decide(statuses: Sequence[RankStatus]) -> ResumePoint:
    """Returns where the job goes on.

    The newest committed iteration is always the one to resume: whoever committed it had everybody's contribution.

    Args:
        statuses: of every rank, by rank.

    Raises:
        NothingToResume: nothing was committed yet, or no rank is left that took part.
    """
    survivors = [status for status in statuses if status.was_training]
    if not survivors:
        raise NothingToResume("no rank that trained is left")
    records = [(rank, status, False) for rank, status in enumerate(statuses) if status.was_training]
    # A rank on its way back to an iteration does not have it, and remembers who had.
    records += [
        (rank, status.goal, True) for rank, status in enumerate(statuses) if status.was_training and status.goal
    ]
    newest = max((status.committed for _, status, _ in records if status.committed is not None), default=None)
    if newest is None or newest == survivors[0].began_at:
        raise NothingToResume("nothing was committed yet")
    holders = [status for status in statuses if status.committed is not None]
    # The last rank prints and logs what is due, so it must have been there, too.
    all_went_on = all(status.committed == newest and status.has_begun_next for status in holders)
    is_between = not (statuses[-1].was_training and holders and all_went_on)
    reference, _, reference_is_goal = next(
        record for record in records if record[1].committed == newest and (is_between or record[1].has_begun_next)
    )
    lost = frozenset(rank for rank, status in enumerate(statuses) if status.committed is None)
    # Those of a lost stage follow, too: it may be that only the lost rank is restored.
    followers = frozenset(rank for rank, status in enumerate(statuses) if status.committed == newest - 1)
    lost_stages = frozenset(statuses[rank].stage for rank in lost)
    return ResumePoint(newest, lost, lost_stages, followers, reference, reference_is_goal, is_between)


def peer_of_follower(rank: int, statuses: Sequence[RankStatus], point: ResumePoint) -> int | None:
    """Returns a rank of the same model replica that made the update which ``rank`` follows, if there is one."""
    replica = statuses[rank].replica
    return next(
        (
            peer
            for peer, status in enumerate(statuses)
            if status.committed == point.iteration and status.replica == replica
        ),
        None,
    )
