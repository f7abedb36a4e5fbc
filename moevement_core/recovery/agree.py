"""Agreement after a failure: from which iteration the job resumes, and what each rank has to do.

Ranks that lost their state recover it, and ranks that lack one update apply it. Every rank decides by itself from the
reports of all ranks, so all ranks come to the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moevement_core.util.iterations import newest_of


@dataclass(frozen=True)
class Distrust:
    """Iterations whose results are not trusted, because an audit has found silent corruption."""

    trusted: int
    """Newest iteration whose state is trusted; the job goes back to it."""
    clean_at: int | None
    """Newest iteration at which the corrupted stages were known to be clean; None for none.

    The recovery begins from snapshots up to this iteration, if there are any.
    """


@dataclass(frozen=True)
class RankStatus:
    """Report of a rank on its training state, which all ranks exchange after a failure."""

    stage: int
    """Pipeline stage of the rank."""
    replica: int
    """Model replica that the rank belongs to; ranks of one replica clip by the same norm."""
    was_training: bool = False
    """True if the rank trained before the failure; a replacement did not."""
    is_last: bool = False
    """True if the rank was the last one of the job, which prints and logs the results of evaluations."""
    start: int = 0
    """Number of the start of the job since which the rank has trained.

    A process that was a spare for some time may still have state of an earlier start.
    """
    formation: int = 0
    """Generation in which an elastic job took its present ranks, when the rank last trained."""
    formed_at: int = 0
    """Iteration from which the job went on in :attr:`formation`."""
    began_at: int | None = 0
    """Iteration that the job started from: 0, or that of the checkpoint or window that it loaded. None if the job may
    also resume from that iteration, because the memory of its ranks has the state.
    """
    committed: int | None = None
    """Last iteration that the rank committed; None if it has no state of any iteration."""
    has_begun_next: bool = False
    """True if the rank had begun the iteration after ``committed``, so that any evaluation or dense save due between
    the two iterations is done."""
    may_follow: bool = True
    """False if the rank has only a copy of its state in host memory, so that it cannot apply an update."""
    persisted: int | None = None
    """First snapshot of the newest run that this rank knows to be persisted on every rank; None without one."""
    goal: RankStatus | None = None
    """Status of another rank, copied from it during a recovery that a second failure interrupted.

    That rank had committed the iteration which the interrupted recovery was to reach. None if no recovery of this rank
    was interrupted.
    """
    distrust: Distrust | None = None
    """Iterations that the rank does not trust; None if it trusts its state. :attr:`goal` is then the trusted state."""
    rolls_back: str = ""
    """Reason why the job rolls back to an older window after a loss spike; empty if it does not."""


@dataclass(frozen=True)
class ResumePoint:
    """Iteration from which the job resumes, and what ranks have to do first; every rank computes an equal result."""

    iteration: int
    """Newest iteration that any rank is known to have committed, or :data:`ONLY_SNAPSHOTS`."""
    lost_ranks: frozenset[int]
    """Ranks that have no training state of a committed iteration, such as replacements."""
    lost_stages: frozenset[int]
    """Pipeline stages of :attr:`lost_ranks`; all other stages keep their state."""
    followers: frozenset[int]
    """Ranks that lack only the optimizer update of :attr:`iteration`. They took part in all reductions of this
    iteration, so each follower applies the update without other ranks."""
    reference: int
    """Rank whose record of :attr:`iteration` (losses, gradient norm) all ranks use."""
    reference_is_goal: bool
    """True if the rank :attr:`reference` did not commit :attr:`iteration` itself. It then has the record of a rank that
    did, from an interrupted recovery (:attr:`RankStatus.goal`)."""
    is_between: bool
    """True if the failure may have prevented an evaluation or dense save that is due right after :attr:`iteration`."""
    persisted: int | None = None
    """First snapshot of the newest run that any rank knows to be persisted on every rank; None without one."""
    clean_at: int | None = None
    """Newest iteration whose snapshots the recovery should use; None for any."""


ONLY_SNAPSHOTS = -1
"""Resume iteration of an elastic job of which no rank has the state of an iteration. Snapshots may have it."""


class NothingToResume(Exception):
    """Error: no iteration exists from which the job can resume, so the job restarts; the message says why."""


def decide(statuses: Sequence[RankStatus]) -> ResumePoint:
    """Return the iteration from which the job resumes, and which ranks lack their state or an update.

    The job always resumes from the newest committed iteration. A rank commits only after the reductions have the
    contributions of all ranks, so all ranks can reach this iteration.

    Args:
        statuses: status of every rank, in order of ranks.

    Raises:
        NothingToResume: no iteration was committed yet, no rank that trained is left, or the job rolls back.
    """
    if not any(status.was_training for status in statuses):
        raise NothingToResume("no rank that trained is left")
    statuses = _of_one_history(statuses)
    if reason := next((status.rolls_back for status in statuses if status.rolls_back), ""):
        raise NothingToResume(reason)
    distrust = min((each.distrust for each in statuses if each.distrust), key=lambda each: each.trusted, default=None)
    if distrust is not None:
        statuses = [_without_state(status, distrust.trusted) for status in statuses]
    survivors = [status for status in statuses if status.was_training]
    records = [(rank, status, False) for rank, status in enumerate(statuses) if status.was_training]
    # A rank whose recovery was interrupted lacks the state of the target iteration. But it keeps the status of a rank
    # that had committed that iteration.
    records += [
        (rank, status.goal, True) for rank, status in enumerate(statuses) if status.was_training and status.goal
    ]
    newest = max((status.committed for _, status, _ in records if status.committed is not None), default=None)
    if newest is None and survivors and all(status.began_at is None for status in survivors):
        return _from_snapshots(statuses)
    if newest is None or newest == survivors[0].began_at:
        raise NothingToResume("no iteration was committed yet")
    holders = [status for status in statuses if _has_state(status, newest)]
    all_went_on = all(status.committed == newest and status.has_begun_next for status in holders)
    # The last rank prints and logs the results of evaluations, so it must have trained as well.
    is_last_here = any(
        status.is_last and (status.committed is None or _has_state(status, newest)) for status in survivors
    )
    is_between = not (is_last_here and holders and all_went_on)
    reference, _, reference_is_goal = next(
        record for record in records if record[1].committed == newest and (is_between or record[1].has_begun_next)
    )
    # Survivors of a lost stage are followers as well, because the recovery may restore the failed rank alone.
    followers = frozenset(
        rank for rank, status in enumerate(statuses) if status.committed == newest - 1 and status.may_follow
    )
    lost = frozenset(rank for rank, status in enumerate(statuses) if not _has_state(status, newest))
    lost_stages = frozenset(statuses[rank].stage for rank in lost)
    return ResumePoint(
        iteration=newest,
        lost_ranks=lost,
        lost_stages=lost_stages,
        followers=followers,
        reference=reference,
        reference_is_goal=reference_is_goal,
        persisted=newest_of(status.persisted for status in survivors),
        is_between=is_between,
        clean_at=None if distrust is None else distrust.clean_at,
    )


def _without_state(status: RankStatus, trusted: int) -> RankStatus:
    """Return the status of a rank that goes back with all others to iteration ``trusted``.

    A rank that had not learned of the verdict has the state of a later iteration. One that had already recovered before
    a second failure has the state of ``trusted``, but its stage may have lost it again.
    """
    goal = status if status.committed == trusted else status.goal
    return replace(status, committed=None, may_follow=False, goal=goal)


def _has_state(status: RankStatus, newest: int) -> bool:
    """Return True if a rank has the state of iteration ``newest``, or can reach it by an update."""
    return status.committed == newest or (status.committed == newest - 1 and status.may_follow)


def _from_snapshots(statuses: Sequence[RankStatus]) -> ResumePoint:
    """Return the point of an elastic job in which only snapshots hold state, because each update was torn."""
    everyone = range(len(statuses))
    return ResumePoint(
        iteration=ONLY_SNAPSHOTS,
        lost_ranks=frozenset(everyone),
        lost_stages=frozenset(status.stage for status in statuses),
        followers=frozenset(),
        reference=next(rank for rank in everyone if statuses[rank].was_training),
        reference_is_goal=False,
        is_between=True,
    )


def _of_one_history(statuses: Sequence[RankStatus]) -> Sequence[RankStatus]:
    """Return ``statuses`` without states of other histories, which former spares of an elastic job may have.

    State of an earlier start does not count. The state of an earlier formation counts if the newest formation went on
    from it. If it is of a later iteration, the newest formation executed this iteration again.
    """
    newest = max((status for status in statuses if status.was_training), key=lambda each: (each.start, each.formation))

    def fitted(status: RankStatus) -> RankStatus:
        if not status.was_training or (status.start, status.formation) == (newest.start, newest.formation):
            return status
        if status.start < newest.start:
            return replace(status, was_training=False, committed=None, goal=None, rolls_back="")
        is_of_history = status.committed is not None and status.committed <= newest.formed_at
        return replace(status, may_follow=False, is_last=False, committed=status.committed if is_of_history else None)

    return list(map(fitted, statuses))


def peers_of_followers(statuses: Sequence[RankStatus], point: ResumePoint) -> dict[int, int | None]:
    """Return, for each follower, a rank of its model replica that has applied the update which the follower lacks.

    The value is None if every rank of the model replica lacks the update.
    """
    applied: dict[int, int] = {}
    for rank, status in enumerate(statuses):
        if status.committed == point.iteration and rank not in point.lost_ranks:
            applied.setdefault(status.replica, rank)
    return {rank: applied.get(statuses[rank].replica) for rank in point.followers}
