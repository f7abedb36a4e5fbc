"""Recovery of a job whose ranks have met after a failure (:mod:`moevement_core.session.meeting`).

:func:`rejoin` plans how failed ranks get their state back, and fetches snapshots, before the trainer opens its data.
The training loop then calls :meth:`Rejoined.resume`, which replays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from moevement_core.errors import RecoveryError
from moevement_core.rebuild.prepare import Prepared
from moevement_core.restart.generation import refuse_if_interrupted, waiting_for_others
from moevement_core.run.outcome import Recovery
from moevement_core.session.failure_report import Times, report_failure
from moevement_core.session.meeting import Meeting
from moevement_core.session.rank_report import RankReport
from moevement_core.session.session import Session
from moevement_core.trainer.capabilities import SupportsRecoveryHook, SupportsTotals
from moevement_core.trainer.commit import Mark


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
        if isinstance(binding, SupportsRecoveryHook):
            binding.on_recovered(self.until, mark.outcome, is_between=self.is_between)

    def _replay(self, prepared: Prepared) -> Recovery:
        session, binding = self.session, self.session.binding
        before, is_restored = session.commit.mark, prepared.own_plan is not None
        if is_restored:
            session.commit.mark = None  # this rank has no complete state until the replay ends
        with waiting_for_others():
            outcomes = {self.until: {"step": self.reached.outcome}} | dict(prepared.outcomes)
            if session.recoverer.recomputes:
                outcomes = {}
            recovery = session.recoverer.execute(replace(prepared, outcomes=outcomes), is_reported=False)
        refuse_if_interrupted()  # an aborted reduction may seem complete, and digests do not cover all reductions
        if prepared.own_plan is not None and session.recoverer.clean_at is not None and binding.record is not None:
            # The lines of iterations that were executed anew are written anew.
            binding.record.take_over(first_iteration=prepared.own_plan.iterations.start)
        if is_restored:
            # The snapshot may be from after a scheduled evaluation or save. Ranks repeat that from the state before it.
            common = dict(self.reached.common if self.is_between else {})
            if session.recoverer.recomputes:
                common = {name: common[name] for name in ("progress",) if name in common}
            live = binding.boundary_copy() | common
            resumed = None if self.is_between else live
            # A rank that was interrupted within this very update has the mark of the iteration before.
            is_known = before is not None and before.iteration == self.until
            outcome = before.outcome if before is not None and is_known else self.reached.outcome
            if (
                session.recoverer.recomputes
                and prepared.own_plan is not None
                and self.until in prepared.own_plan.iterations
            ):
                outcome = session.records.of_last(self.until).get("step", outcome)
            session.commit.mark = Mark(self.until, live, outcome, resumed)
        return recovery


class Unrecoverable(RecoveryError):
    """Error that the lost state is unrecoverable, raised on every rank. The session is unusable afterwards."""


def rejoin(session: Session, meeting: Meeting) -> Rejoined:
    """Prepare the recovery on which the ranks have agreed. Collective.

    Args:
        session: session of this rank, in the present generation.
        meeting: result of the meeting.

    Raises:
        Unrecoverable: the lost state is unrecoverable, and this rank's session is unusable. Every rank raises it.
    """
    binding, point, reached = session.binding, meeting.point, meeting.reached
    common = reached.common if point.is_between else reached.begun or reached.common
    binding.put_progress(common["progress"])
    if isinstance(binding, SupportsTotals):
        binding.resume(point.iteration, reached.run_totals)
    session.saving.disk.start()
    session.recoverer.clean_at = point.clean_at
    if session.auditor.distrust is not None and binding.record is not None:
        binding.record.take_over(first_iteration=point.iteration + 1)  # drops the lines of distrusted iterations
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
        usable_at=meeting.usable_at,
        prepared_at=time.time(),
    )
