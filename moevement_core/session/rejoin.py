"""Meeting of all ranks after a failure: they exchange reports, and agree on the resume iteration.

Survivors report the iteration that they committed last, and ``recovery/agree.py`` decides. If a survivor lacks only the
update of the resume iteration, it has finished the reductions of that update, so it applies the update now.
:func:`rejoin` also plans how failed ranks get their state back, and fetches snapshots, before the trainer opens its
data. The training loop then calls :meth:`Rejoined.resume`, which replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from moevement_core.comms.codec import Plain
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.errors import RecoveryError
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.agree import RankStatus, ResumePoint, decide, peer_of_follower
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import refuse_if_interrupted, waiting_for_others
from moevement_core.run.outcome import Recovery
from moevement_core.saving.identity import JobNames, job_name
from moevement_core.saving.peers import Copies
from moevement_core.saving.saving import Joining
from moevement_core.saving.stage_policy import Policy, SentPolicy, agree
from moevement_core.session.failure_report import Times, report_failure
from moevement_core.session.session import Session
from moevement_core.trainer.binding import Binding
from moevement_core.trainer.commit import Mark
from moevement_core.trainer.config import SessionConfig


@dataclass(frozen=True)
class RankReport:
    """Report that each rank sends to all other ranks when they meet after a failure."""

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
    shared: Any = None
    """Data from which a replacement builds its model and optimizer (``Binding.build_data``)."""
    keeps: Copies = field(default_factory=dict)
    """Snapshots that the rank keeps for other ranks: schedule id of each, by owner and iteration."""
    policy: Policy | None = None
    """Decisions of the rank's stage on windows and schedules; None on a replacement."""
    goal: RankReport | None = None
    """Report, from an interrupted recovery, of a rank that had committed the resume iteration of that recovery.

    Set if the recovery was interrupted before it had restored this rank's state; otherwise None.
    """


@dataclass(frozen=True)
class _Sent:
    """Encoding of a :class:`RankReport` for the exchange between ranks."""

    status: RankStatus
    data: Plain
    """Values of ``outcome``, ``common``, ``begun``, ``run_totals`` and ``shared``, in this order."""
    keeps: dict[int, dict[int, str]]
    policy: SentPolicy | None
    goal: _Sent | None


def _packed(report: RankReport) -> _Sent:
    begun = dict(report.begun) if report.begun is not None else None
    return _Sent(
        status=report.status,
        data=Plain((dict(report.outcome), dict(report.common), begun, report.run_totals, report.shared)),
        keeps={rank: dict(copies) for rank, copies in report.keeps.items()},
        policy=SentPolicy.of(report.policy) if report.policy is not None else None,
        goal=_packed(report.goal) if report.goal is not None else None,
    )


def _unpacked(sent: _Sent) -> RankReport:
    outcome, common, begun, run_totals, shared = sent.data.value
    return RankReport(
        status=sent.status, outcome=outcome, common=common, begun=begun, run_totals=run_totals, shared=shared,
        keeps=sent.keeps, policy=sent.policy.policy() if sent.policy is not None else None,
        goal=_unpacked(sent.goal) if sent.goal is not None else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Rejoined:
    """Result of :func:`rejoin`: equal on every rank, except for the session, prepared snapshots, and times."""

    session: Session
    until: int
    """Iteration whose state all ranks have when training resumes."""
    lost: frozenset[int]
    """Pipeline stages in which at least one rank lost its state."""
    prepared: Prepared | None
    """Plan and snapshots of the recovery; None if no stage lost its state."""
    reached: RankReport
    """Report of a rank that has committed ``until``."""
    is_between: bool
    """True if an evaluation or dense save scheduled between ``until`` and the next iteration may not have happened."""
    usable_at: float
    """Time at which the new process groups were usable, in seconds since the epoch."""
    prepared_at: float
    """Time at which this rank had its plan and snapshots, in seconds since the epoch."""

    def resume(self) -> None:
        """Restore lost state and the boundary record, and run an evaluation or save that the failure prevented.

        Every rank calls it inside the training loop, before its first iteration.

        Raises:
            RecoveryError: state that ranks recovered or kept differs from its recorded digests. Every rank raises it.
        """
        session, binding = self.session, self.session.binding
        replay_at, recovery = time.time(), None
        if self.prepared is not None:
            recovery = self._replay(self.prepared)
        mark = session.commit.mark
        assert mark is not None
        binding.put_boundary(mark.boundary if self.is_between or mark.resumed is None else mark.resumed)
        kept = session.recoverer.check_kept(self.until, self.prepared)
        session.resumed(self.until)
        times = Times(self.usable_at, self.prepared_at, replay_at, time.time())
        report_failure(session, until=self.until, lost=self.lost, recovery=recovery, kept=kept, times=times)
        binding.on_recovered(self.until, mark.outcome, is_between=self.is_between)

    def _replay(self, prepared: Prepared) -> Recovery:
        session, binding = self.session, self.session.binding
        before, is_restored = session.commit.mark, prepared.own_plan is not None
        if is_restored:
            session.commit.mark = None  # this rank has no complete state until the replay ends
        with waiting_for_others():
            outcomes = {self.until: {"step": self.reached.outcome}} | dict(prepared.outcomes)
            if session.recoverer.may_differ:
                outcomes = {}
            recovery = session.recoverer.execute(replace(prepared, outcomes=outcomes), is_reported=False)
        refuse_if_interrupted()  # an aborted reduction may seem complete, and digests do not cover all reductions
        if is_restored:
            # The snapshot may be from after a scheduled evaluation or save. Ranks repeat that from the state before it.
            common = dict(self.reached.common if self.is_between else {})
            if session.recoverer.may_differ:
                common = {name: common[name] for name in ("progress",) if name in common}
            live = binding.boundary_copy() | common
            resumed = None if self.is_between else live
            # A rank that was interrupted within this very update has the mark of the iteration before.
            is_known = before is not None and before.iteration == self.until
            outcome = before.outcome if before is not None and is_known else self.reached.outcome
            if (
                session.recoverer.may_differ
                and prepared.own_plan is not None
                and self.until in prepared.own_plan.iterations
            ):
                outcome = session.records.of_last(self.until).get("step", outcome)
            session.commit.mark = Mark(self.until, live, outcome, resumed)
        return recovery


def report_of(binding: Binding, session: Session | None, rejoined: Rejoined | None) -> RankReport:
    """Return the report of this rank to all others.

    Args:
        binding: binding of this rank.
        session: session of a survivor that had begun training; None on a replacement.
        rejoined: result of :func:`rejoin` of a recovery that this failure interrupted; None without one.
    """
    place = binding.place()
    status = RankStatus(stage=place.stage, replica=place.replica)
    if session is None:
        return RankReport(status)
    status = replace(status, was_training=True, began_at=session.saving.began_at)
    kept = RankReport(
        status,
        keeps=session.saving.keeps(),
        shared=binding.build_data(),
        policy=session.saving.policy(),
        run_totals=binding.run_totals(),
    )
    mark = session.commit.mark if not session.commit.torn else None
    if mark is None:
        goal = rejoined.reached if rejoined is not None else None
        return replace(kept, status=replace(status, goal=goal.status if goal is not None else None), goal=goal)
    return replace(
        kept,
        status=replace(status, committed=mark.iteration, has_begun_next=mark.resumed is not None),
        outcome=mark.outcome,
        common=binding.replicated_state(mark.boundary),
        begun=binding.replicated_state(mark.resumed) if mark.resumed is not None else None,
    )


class Unrecoverable(RecoveryError):
    """Error that the lost state is unrecoverable, raised on every rank. The session is unusable afterwards."""


def rejoin(
    binding: Binding,
    config: SessionConfig,
    session: Session | None,
    before: Rejoined | None,
    joined: Callable[[Session, int], None],
) -> Rejoined:
    """Meet the other ranks after a failure, and prepare the recovery. Every rank calls it, with usable process groups.

    Args:
        binding: binding of this rank.
        config: flags of the job.
        session: session of a survivor that had begun training; None on a replacement.
        before: result of this function in a recovery that the failure interrupted; None without one.
        joined: function that is called with this generation's session, as soon as it exists, and the resume iteration.
            A further failure may come at any moment afterwards, and the caller must then disconnect this session.

    Raises:
        NothingToResume: the job restarts, from disk or from its beginning. Every rank raises it.
        Unrecoverable: the lost state is unrecoverable, and this rank's session is unusable. Every rank raises it.
        RecoveryError: objects of this rank cannot use the new process groups.
    """
    usable_at = time.time()
    sent = all_gather_objects(_packed(report_of(binding, session, before)), _Sent)
    reports = [_unpacked(report) for report in sent]
    statuses = [report.status for report in reports]
    point = decide(statuses)
    injection.at(Phase.RECOVER, point.iteration)
    reached = reports[point.reference]
    if point.reference_is_goal:
        assert reached.goal is not None
        reached = reached.goal
    is_as_at_start = False
    if session is not None:
        binding.regroup()
    else:
        survivor = next(report for report in reports if report.status.was_training)
        is_as_at_start = binding.build(survivor.shared)
    if session is not None and dist.get_rank() in point.followers:
        _follow(session, point, reports, reached)
    is_survivor = session is not None
    session = _go_on_or_join(binding, config, session, reports)
    joined(session, point.iteration)
    if is_survivor:  # the schedules that all ranks have agreed on decide what is logged
        _log_gradients(session)
    binding.clear_gradients()
    if is_as_at_start:
        session.saving.take_start()
    common = reached.common if point.is_between else reached.begun or reached.common
    binding.put_progress(common["progress"])
    binding.resume(point.iteration, reached.run_totals)
    session.saving.disk.start()
    prepared = None
    if point.lost_stages:
        try:
            with waiting_for_others():
                mark = session.commit.mark if not session.commit.torn else None
                prepared = session.recoverer.prepare(point.iteration, point.lost_stages, point.lost_ranks, mark)
        except RecoveryError as error:
            raise Unrecoverable(str(error)) from error
    if session.saving.topology.stage not in point.lost_stages:
        session.commit.gather(now=True)
    return Rejoined(
        session,
        until=point.iteration,
        lost=point.lost_stages,
        prepared=prepared,
        reached=reached,
        is_between=point.is_between,
        usable_at=usable_at,
        prepared_at=time.time(),
    )


def _follow(session: Session, point: ResumePoint, reports: Sequence[RankReport], reached: RankReport) -> None:
    """Apply the only update that this rank lacks: the update of the resume iteration."""
    statuses = [report.status for report in reports]
    peer = peer_of_follower(dist.get_rank(), statuses, point)
    outcome = (reports[peer] if peer is not None else reached).outcome
    mark = session.commit.mark
    if point.iteration in session.binding.iterations_left_out() and mark is not None:  # left out: it has no update
        session.commit.mark = Mark(point.iteration, {**mark.boundary, **reached.common}, {})
        return
    session.commit.follow(point.iteration, outcome, reached.common)


def _log_gradients(session: Session) -> None:
    """Begin to save the gradients of the last update, which are still live if no later iteration has begun."""
    mark = session.commit.mark
    if mark is None or session.commit.torn:
        return
    if mark.iteration not in session.binding.iterations_left_out():
        session.saving.checkpointer.log_gradients(mark.iteration)
    session.saving.checkpointer.wait_for_gradient_copies(mark.iteration)


def _go_on_or_join(
    binding: Binding, config: SessionConfig, session: Session | None, reports: Sequence[RankReport]
) -> Session:
    """Return the session of this generation: on a survivor, the old one with new connections, else a new one."""
    policies = [(report.status.stage, report.policy) for report in reports if report.policy is not None]
    policy, is_of_same_stage = agree(reports[dist.get_rank()].status.stage, policies)
    kept = [report.keeps for report in reports]
    if session is not None:
        session.rewire(policy, kept)
        return session
    return Session(binding, config, JobNames(job_name() or ""), joining=Joining(policy, is_of_same_stage, kept))
