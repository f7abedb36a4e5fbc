"""Reports that ranks exchange after a failure, before they prepare a recovery.

All ranks exchange their statuses, which are small. Only one rank sends its record of the resume iteration to all, and
only ranks whose outcome a follower needs send it. So a rank receives O(N) bytes, of which a status takes about 100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from moevement_core.comms.codec import Plain
from moevement_core.comms.exchange import all_gather_objects, broadcast_object
from moevement_core.recovery.agree import RankStatus, ResumePoint, peers_of_followers
from moevement_core.session.session import Session
from moevement_core.trainer.capabilities import run_totals
from moevement_core.trainer.commit import Mark
from moevement_core.trainer.interface import Place


@dataclass(frozen=True)
class RankReport:
    """Report of a rank on the iteration that it committed last."""

    status: RankStatus
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Results of the reductions of the rank's last committed step (:attr:`Mark.outcome`)."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the boundary record that are equal on all ranks, right after the rank's last committed iteration."""
    begun: Mapping[str, Any] | None = None
    """Entries of the boundary record that are equal on all ranks, at the beginning of the interrupted iteration.

    A scheduled evaluation or save before that iteration is over by then. None if the failure interrupted no iteration.
    """
    run_totals: Any = None
    """Totals of the run, such as floating-point operations, for replacements (``Binding.run_totals``)."""
    goal: RankReport | None = None
    """Report, from an interrupted recovery, of a rank that had committed the resume iteration of that recovery.

    Set if the recovery was interrupted before it had restored this rank's state; otherwise None.
    """


@dataclass(frozen=True)
class _Sent:
    """Encoding of the report of the resume iteration, without its goal, and of the data for replacements."""

    status: RankStatus
    data: Plain
    """Values of ``outcome``, ``common``, ``begun`` and ``run_totals``, and the build data, in this order."""


def _packed(report: RankReport, build_data: Any) -> _Sent:
    begun = dict(report.begun) if report.begun is not None else None
    data = (dict(report.outcome), dict(report.common), begun, report.run_totals, build_data)
    return _Sent(report.status, Plain(data))


def _unpacked(sent: _Sent) -> tuple[RankReport, Any]:
    outcome, common, begun, run_totals, build_data = sent.data.value
    return RankReport(sent.status, outcome, common, begun, run_totals=run_totals), build_data


def report_of(session: Session | None, reached: RankReport | None, place: Place | None = None) -> RankReport:
    """Return the report of this rank.

    Args:
        session: session of a survivor that had begun training; None on a replacement.
        reached: report of the resume iteration of a recovery that this failure interrupted; None without one.
        place: position of a replacement in the present process groups; None if the ranks of the job change.
    """
    if session is None:
        place = place or Place()
        return RankReport(RankStatus(stage=place.stage, replica=place.replica))
    binding, topology = session.binding, session.saving.topology
    status = RankStatus(
        stage=topology.stage,
        replica=topology.replica,
        was_training=True,
        is_last=topology.rank == topology.world - 1,
        began_at=session.saving.began_at,
        persisted=session.saving.checkpointer.lifetime.first_needed,
        rolls_back=rollback.reason if (rollback := session.loss_watch.pending()) is not None else "",
    )
    mark = session.commit.mark if not session.commit.torn else None
    if (distrusted := session.auditor.distrust) is not None:
        distrust, trusted = distrusted
        status, mark = replace(status, distrust=distrust), None
        reached = None if trusted is None else _at(trusted, status, session)
    elif mark is None and session.auditor.executions.unfinished is not None:
        reached = _at(session.auditor.executions.unfinished, status, session)
    if mark is None:
        goal_status = reached.status if reached is not None else None
        return RankReport(replace(status, goal=goal_status), run_totals=run_totals(binding), goal=reached)
    return _at(mark, status, session)


def _at(mark: Mark, status: RankStatus, session: Session) -> RankReport:
    """Return the report of a rank that has committed the iteration of ``mark``."""
    binding = session.binding
    return RankReport(
        replace(status, committed=mark.iteration, has_begun_next=mark.resumed is not None),
        outcome=mark.outcome,
        common=binding.replicated_state(mark.boundary),
        begun=binding.replicated_state(mark.resumed) if mark.resumed is not None else None,
        run_totals=run_totals(binding),
    )


def share_reached(
    report: RankReport, statuses: Sequence[RankStatus], point: ResumePoint, build_data: Callable[[], Any]
) -> tuple[RankReport, Any]:
    """Return the report of the resume iteration, and the data from which a replacement builds its model. Collective.

    The rank ``point.reference`` sends both. The data is None if the job has no replacement.

    Args:
        report: report of this rank.
        statuses: status of every rank.
        point: resume point of the job.
        build_data: function that returns the data from which a replacement builds its model.
    """
    sent = None
    if dist.get_rank() == point.reference:
        reached = report.goal if point.reference_is_goal else report
        assert reached is not None
        has_replacement = not all(status.was_training for status in statuses)
        sent = _packed(reached, build_data() if has_replacement else None)
    return _unpacked(broadcast_object(sent, _Sent, source=point.reference))


def outcome_to_follow(
    report: RankReport, reached: RankReport, statuses: Sequence[RankStatus], point: ResumePoint
) -> Mapping[str, Any]:
    """Return the outcome of the update that this rank lacks, or an empty mapping if it lacks none. Collective.

    It is the outcome on a rank of the same model replica that has applied the update, or else that of ``reached``.
    If no rank lacks an update, ranks exchange nothing.

    Args:
        report: report of this rank.
        reached: report of the resume iteration.
        statuses: status of every rank.
        point: resume point of the job.
    """
    if not point.followers:
        return {}
    rank, peers = dist.get_rank(), peers_of_followers(statuses, point)
    own = [Plain(dict(report.outcome))] if rank in peers.values() else []
    outcomes: list[list[Plain]] = all_gather_objects(own, list[Plain])
    if rank not in point.followers:
        return {}
    peer = peers[rank]
    return reached.outcome if peer is None else dict(outcomes[peer][0].value)
