"""Meeting of all ranks after a failure: they exchange reports, and agree on the resume iteration and on policies.

Survivors report the iteration that they committed last, and ``recovery/agree.py`` decides. If a survivor lacks only the
update of the resume iteration, it has finished the reductions of that update, so it applies the update now.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.recovery.agree import RankStatus, ResumePoint, decide
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.saving.saving import Joining
from moevement_core.saving.stage_policy import share_policy
from moevement_core.session.rank_report import RankReport, outcome_to_follow, report_of, share_reached
from moevement_core.session.session import Session
from moevement_core.trainer.binding import Binding
from moevement_core.trainer.commit import Mark


@dataclass(frozen=True)
class Meeting:
    """Agreement of all ranks after a failure. Policies differ from stage to stage, the rest is equal on every rank."""

    point: ResumePoint
    reached: RankReport
    """Report of a rank that has committed the resume iteration."""
    joining: Joining
    """Policy with which this rank continues."""
    build_data: Any
    """Data from which a replacement builds its model; None if the job has no replacement."""
    outcome: Mapping[str, Any]
    """Outcome of the only update that this rank lacks; empty if it lacks none."""
    usable_at: float
    """Time at which the new process groups were usable, in seconds since the epoch."""


def meet(binding: Binding, session: Session | None, reached: RankReport | None) -> Meeting:
    """Meet the other ranks after a failure. Collective: every rank calls it, with usable process groups.

    Args:
        binding: binding of this rank.
        session: session of a survivor that had begun training; None on a replacement.
        reached: report of the resume iteration of a recovery that the failure interrupted; None without one.

    Raises:
        NothingToResume: the job restarts, from disk or from its beginning. Every rank raises it.
    """
    usable_at = time.time()
    report = report_of(binding, session, reached)
    statuses = all_gather_objects(report.status, RankStatus)
    point = decide(statuses)
    injection.at(Phase.RECOVER, point.iteration)
    resumed, build_data = share_reached(binding, report, statuses, point)
    outcome = outcome_to_follow(report, resumed, statuses, point)
    if session is not None:
        session.saving.checkpointer.lifetime.catch_up(point.persisted)
    policy, is_of_same_stage = share_policy(report.status.stage, session.saving.policy() if session else None)
    return Meeting(
        point,
        resumed,
        joining=Joining(policy, is_of_same_stage),
        build_data=build_data,
        outcome=outcome,
        usable_at=usable_at,
    )


def go_on(session: Session, meeting: Meeting) -> None:
    """Take a survivor's session into the present generation. Replacements build a session at the same point.

    Args:
        session: session of a survivor.
        meeting: result of :func:`meet`.
    """
    session.binding.regroup()
    if dist.get_rank() in meeting.point.followers:
        _follow(session, meeting)
    session.rewire(meeting.joining.policy)


def _follow(session: Session, meeting: Meeting) -> None:
    """Apply the only update that this rank lacks: the update of the resume iteration."""
    mark, point, common = session.commit.mark, meeting.point, meeting.reached.common
    if point.iteration in session.binding.iterations_left_out() and mark is not None:  # left out: it has no update
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
    if mark.iteration not in session.binding.iterations_left_out():
        session.saving.checkpointer.log_gradients(mark.iteration)
    session.saving.checkpointer.wait_for_gradient_copies(mark.iteration)
