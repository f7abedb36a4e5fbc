"""Way of one rank from a failure back to training: it meets the others, gets a session, and prepares the recovery."""

from __future__ import annotations

from collections.abc import Callable

from moevement_core.saving.identity import names_of_running_job
from moevement_core.session.build import build_session
from moevement_core.session.meeting import agree_on_policy, go_on, log_gradients, meet
from moevement_core.session.rank_report import report_of
from moevement_core.session.rejoin import Rejoined, rejoin
from moevement_core.session.session import Session
from moevement_core.trainer.capabilities import SupportsGradientChecks, SupportsLateBuild, leave_out
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface


def take_up(
    binding: BindingInterface,
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
    if session is not None:
        session.auditor.leave_if_wrong()
    place = binding.place()
    build_data = binding.build_data if isinstance(binding, SupportsLateBuild) else lambda: None
    meeting = meet(report_of(session, before.reached if before is not None else None, place), build_data)
    joining = agree_on_policy(session, meeting, place.stage)
    is_survivor, is_as_at_start = session is not None, False
    if session is not None:
        go_on(session, meeting, joining)
    else:
        names = names_of_running_job()
        if names.rollback is not None:
            leave_out(binding, names.rollback.left_out)
        # A trainer without this capability has built everything in its constructor.
        is_as_at_start = not isinstance(binding, SupportsLateBuild) or binding.build(meeting.build_data)
        session = build_session(binding, config, names, joining=joining)
    joined(session, meeting.point.iteration)
    if is_survivor:
        log_gradients(session)
    if isinstance(binding, SupportsGradientChecks):
        binding.clear_gradients()
    if is_as_at_start:
        session.saving.take_start()
    return rejoin(session, meeting)
