"""Meeting of all ranks after a failure: they exchange reports, and agree on the resume iteration and on policies.

Survivors report the iteration that they committed last, and ``recovery/agree.py`` decides. If a survivor lacks only the
update of the resume iteration, it has finished the reductions of that update, so it applies the update now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.recovery.agree import RankStatus, ResumePoint, decide
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.saving.saving import Joining
from moevement_core.saving.stage_policy import share_policy
from moevement_core.session.rank_report import RankReport, outcome_to_follow, share_reached
from moevement_core.session.session import Session
from moevement_core.trainer.capabilities import iterations_left_out, regroup
from moevement_core.trainer.commit import Mark


@dataclass(frozen=True)
class Meeting:
    """Agreement of all ranks after a failure, equal on every rank except for :attr:`outcome` and :attr:`usable_at`."""

    point: ResumePoint
    reached: RankReport
    """Report of a rank that has committed the resume iteration."""
    build_data: Any
    """Data from which a replacement builds its model; None if the job has no replacement."""
    outcome: Mapping[str, Any]
    """Outcome of the only update that this rank lacks; empty if it lacks none."""
    usable_at: float
    """Time at which the new process groups were usable, in seconds since the epoch."""


def meet(report: RankReport, build_data: Callable[[], Any] = lambda: None) -> Meeting:
    """Meet the other ranks after a failure. Collective: every rank calls it, with usable process groups.

    Args:
        report: report of this rank.
        build_data: function that returns the data from which a replacement builds its model; survivors need it.

    Raises:
        NothingToResume: the job restarts, from disk or from its beginning. Every rank raises it.
    """
    usable_at = time.time()
    statuses = all_gather_objects(report.status, RankStatus)
    point = decide(statuses)
    injection.at(Phase.RECOVER, point.iteration)
    resumed, build_data_ = share_reached(report, statuses, point, build_data)
    outcome = outcome_to_follow(report, resumed, statuses, point)
    return Meeting(point, resumed, build_data=build_data_, outcome=outcome, usable_at=usable_at)


def agree_on_policy(session: Session | None, meeting: Meeting, stage: int) -> Joining:
    """Return the policy with which this rank continues; ranks of a stage get the same one. Collective.

    Args:
        session: session of a survivor; None on a replacement.
        meeting: result of :func:`meet`.
        stage: pipeline stage of this rank.
    """
    if session is not None:
        session.saving.checkpointer.lifetime.catch_up(meeting.point.persisted)
    policy, is_of_same_stage = share_policy(stage, session.saving.policy() if session else None)
    return Joining(policy, is_of_same_stage)


def go_on(session: Session, meeting: Meeting, joining: Joining) -> None:
    """Take a survivor's session into the present generation. Replacements build a session at the same point.

    Args:
        session: session of a survivor.
        meeting: result of :func:`meet`.
        joining: result of :func:`agree_on_policy`.
    """
    regroup(session.binding)
    follow(session, meeting)
    session.rewire(joining.policy)


def follow(session: Session, meeting: Meeting) -> None:
    """Apply the update of the resume iteration, if it is the only one that this rank lacks. Waits for no other rank."""
    if dist.get_rank() not in meeting.point.followers:
        return
    mark, point, common = session.commit.mark, meeting.point, meeting.reached.common
    if point.iteration in iterations_left_out(session.binding) and mark is not None:  # left out: it has no update
        session.commit.mark = Mark(point.iteration, {**mark.boundary, **common}, {})
        return
    session.commit.follow(point.iteration, meeting.outcome, common)


def log_gradients(session: Session) -> None:
    """Begin to save the gradients of the last update, which are still live if no later iteration has begun.

    Only survivors call it. The schedules on which all ranks have agreed decide what is saved.
    """
    mark = session.commit.mark
    if mark is None or session.commit.torn:
        return
    if mark.iteration not in iterations_left_out(session.binding):
        session.saving.checkpointer.log_gradients(mark.iteration)
    session.saving.checkpointer.gradients.wait(mark.iteration)
