"""Way of one rank of an elastic job back to training, with another number of ranks or another placement of experts.

It differs from :mod:`moevement_core.session.rejoin` in one point: all ranks build a new model, because the present
ranks divide the state anew. The newest state moves from the memory of survivors to the ranks that need it. If some part
of it is on no survivor, ranks divide a window of snapshots anew, and recover from these snapshots inside the training
loop.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.codec import Plain
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import Exchanged, StateMissing, bring_pieces
from moevement_core.elastic.layout import RankLayout
from moevement_core.engine.config import Verify
from moevement_core.rebuild.recut import nearest_of_stage, prepare_from_snapshots
from moevement_core.recovery.agree import NothingToResume
from moevement_core.restart.generation import generation
from moevement_core.run.events import Resized as ResizedEvent
from moevement_core.saving.identity import JobNames, agree_on_names
from moevement_core.session.build import build_session
from moevement_core.session.kept_state import KeptState, Resizing
from moevement_core.session.meeting import Meeting, follow, meet
from moevement_core.session.session import Session
from moevement_core.trainer.capabilities import SupportsRecoveryHook, SupportsTotals, leave_out
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface


@dataclass(frozen=True)
class Offer:
    """Description of the state that a rank brings into the resized job; the state itself moves later."""

    layout: RankLayout | None = None
    """Position of the rank before the change; None if the rank does not have the newest iteration."""
    data: Plain = field(default_factory=lambda: Plain(None))
    """Result of ``Recut.offer`` on the rank."""
    world: int = 0
    """Number of ranks that the job had when the rank last trained; 0 if the rank is new."""


class Rebuilder(ABC):
    """Construction of a model for the present ranks, which the trainer implements."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the model, the optimizer and the session, because host or device memory may not suffice for two models.

        This rank's state is in host memory. Waits for no other rank.
        """

    @abstractmethod
    def build(self, names: JobNames, offers: Sequence[Offer]) -> BindingInterface:
        """Build model and optimizer for the present ranks, with any weights, and return their binding. Collective.

        Args:
            names: names of the job and of this change.
            offers: descriptions of the state that ranks bring, by rank.
        """

    @abstractmethod
    def has_state(self) -> None:
        """Record that this rank has its state, and free the state that it kept during the change of ranks.

        Called inside the training loop, before an evaluation or save that is due. From here on, a failure interrupts a
        rank that has begun to train.
        """

    @abstractmethod
    def begin_record(self, binding: BindingInterface) -> None:
        """Open the record of the run again, on the last of the present ranks. Collective.

        Args:
            binding: result of :meth:`build`, at the resume iteration.
        """


@dataclass(frozen=True, eq=False)
class ResizedSession:
    """State from which this rank continues training after the job changed its ranks."""

    session: Session
    rebuilder: Rebuilder
    until: int
    """Iteration whose state all ranks have when training resumes."""
    boundary: Mapping[str, Any] | None
    """Boundary record after :attr:`until`; None if a recovery from snapshots has to restore the state first."""
    is_between: bool
    """True if an evaluation or a dense save that is due after :attr:`until` may not have happened."""
    results: Mapping[RankLayout, Any]
    """Results of iteration :attr:`until` on survivors (``Recut.results``); empty after a recovery from snapshots."""
    outcome: Mapping[str, Any]
    """Outcome of the step of iteration :attr:`until`; empty if it is not known."""
    world_before: int
    exchanged: Exchanged
    usable_at: float
    """Time at which process groups became usable, in seconds since the epoch."""
    brought_at: float
    """Time at which the transfer of state to this rank ended, in seconds since the epoch."""

    def resume(self) -> None:
        """Restore the rest of the state, and report the change. Collective.

        Every rank calls it inside the training loop, before its first iteration. If the state comes from snapshots, the
        recovery runs here. The rank keeps its old state until then, so a further failure loses nothing.
        """
        session, binding = self.session, self.session.binding
        if self.boundary is not None:
            binding.put_boundary(self.boundary)
            if self.outcome or any(self.results.values()):
                binding.recut().put_results(self.until, self.results, self.outcome)
        session.begin_training()
        self.rebuilder.has_state()
        _report(self)
        if isinstance(binding, SupportsRecoveryHook):
            binding.on_recovered(self.until, {}, is_between=self.is_between)


def resize(resizing: Resizing, session: Session | None, config: SessionConfig, rebuilder: Rebuilder) -> ResizedSession:
    """Meet the other ranks, build a model for the present ranks, and bring the newest state into it. Collective.

    Every rank calls it as soon as process groups are usable: after a failure, when the job grows, and when experts
    move.

    Args:
        resizing: state that this process keeps through changes of ranks.
        session: session of a survivor that had begun training; None on other ranks.
        config: flags of the job.
        rebuilder: construction of the trainer's model.

    Raises:
        NothingToResume: memory does not hold the whole state, so the job restarts. Every rank raises it.
    """
    meeting = meet(resizing.report(session))
    if session is not None:
        follow(session, meeting)
    resizing.keep(session)
    kept = resizing.kept
    if kept is not None and kept.report.status.start != meeting.reached.status.start:
        kept = resizing.kept = None
    offers = all_gather_objects(_offer(kept, meeting), Offer)
    rebuilder.drop()
    session = None
    gc.collect()  # collects the old model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    names = agree_on_names()
    binding = rebuilder.build(names, offers)
    if names.rollback is not None:
        leave_out(binding, names.rollback.left_out)
    try:
        return _resized(resizing, meeting, offers, binding=binding, config=config, names=names, rebuilder=rebuilder)
    except StateMissing as why:
        raise NothingToResume(str(why)) from None


def _offer(kept: KeptState | None, meeting: Meeting) -> Offer:
    if kept is None or not _has_newest(kept, meeting):
        return Offer(world=0 if kept is None else kept.layout.world)
    return Offer(kept.layout, Plain(kept.offer), kept.layout.world)


def _has_newest(kept: KeptState, meeting: Meeting) -> bool:
    """Return True if a rank has the state of the resume iteration, and of the same history as the other ranks."""
    is_lost = dist.get_rank() in meeting.point.lost_ranks
    return not is_lost and kept.mark_of(meeting.point.iteration) is not None


def _resized(
    resizing: Resizing,
    meeting: Meeting,
    offers: Sequence[Offer],
    binding: BindingInterface,
    config: SessionConfig,
    names: JobNames,
    rebuilder: Rebuilder,
) -> ResizedSession:
    """Bring the newest state into the new model, and build a session for it. Collective.

    Raises:
        StateMissing: memory does not hold the whole state. Every rank raises it.
    """
    kept = resizing.kept
    is_verified, until, prepared = config.verify is not Verify.NOTHING, meeting.point.iteration, None
    live = kept if kept is not None and _has_newest(kept, meeting) else None
    results = _results(live, until)
    boundary = _live_boundary(live, meeting, binding)
    try:
        if not all(all_gather_objects(boundary is not None, bool)):
            raise StateMissing("a pipeline stage has no survivor with the state of the newest iteration")
        exchanged = _bring_live(live, binding, is_verified=is_verified)
        progress = boundary["progress"] if boundary is not None else {}
    except StateMissing as why:
        rebuilt = prepare_from_snapshots(kept.snapshots if kept is not None else (), binding, is_verified=is_verified)
        progress, exchanged, prepared = rebuilt.boundary["progress"], rebuilt.exchanged, rebuilt.prepared
        boundary, results, until = None, {}, progress["iteration"]
        if dist.get_rank() == 0:
            log.info(f"{why}; snapshots restore the state after iteration {until}")
    binding.put_progress(progress)
    resizing.formed(binding, meeting.reached.status.start)
    if isinstance(binding, SupportsTotals):
        binding.resume(until, meeting.reached.run_totals)
    rebuilder.begin_record(binding)
    return ResizedSession(
        build_session(binding, config, names, prepared, snapshots_before=kept.snapshots if kept is not None else ()),
        rebuilder,
        until=until,
        boundary=boundary,
        is_between=meeting.point.is_between or until < meeting.point.iteration,
        results=results,
        outcome=meeting.reached.outcome if prepared is None else {},
        world_before=_world_before(offers),
        exchanged=exchanged,
        usable_at=meeting.usable_at,
        brought_at=time.time(),
    )


def _world_before(offers: Sequence[Offer]) -> int:
    """Return the number of ranks before the change. A former spare may know an earlier number."""
    of_newest = [offer.layout.world for offer in offers if offer.layout is not None]
    return max(of_newest or [offer.world for offer in offers])


def _results(live: KeptState | None, iteration: int) -> dict[RankLayout, Any]:
    """Return the results of ``iteration`` on all survivors that have it. Collective."""
    own = None if live is None else (live.layout, Plain(live.results))
    sent = all_gather_objects(own, tuple[RankLayout, Plain] | None)
    return {layout: results.value for layout, results in filter(None, sent)}


def _live_boundary(live: KeptState | None, meeting: Meeting, binding: BindingInterface) -> Mapping[str, Any] | None:
    """Return the boundary record with which this rank continues from the newest iteration. Collective.

    Returns:
        The record, without the state that moves as pieces; None if no survivor of the same stage has one.
    """
    own: dict[RankLayout, Mapping[str, Any]] = {}
    if live is not None and (mark := live.mark) is not None:
        is_complete = not meeting.point.is_between and mark.resumed is not None
        own = {live.layout: mark.resumed if is_complete and mark.resumed is not None else mark.boundary}
    recut = binding.recut()
    nearest = nearest_of_stage(own, recut.layout())
    return None if nearest is None else recut.fitted_boundary(nearest[1], nearest[0])


@torch.no_grad()
def _bring_live(live: KeptState | None, binding: BindingInterface, *, is_verified: bool) -> Exchanged:
    """Fill a newly built model with the state that survivors have after the resume iteration. Collective.

    Returns:
        The number of moved bytes, and the compared digests.

    Raises:
        StateMissing: no rank holds some part of the state; every rank raises this error.
        RecoveryError: replicas differ, or a digest differs after the transfer; every rank raises this error.
    """
    recut = binding.recut()
    held = live.pieces if live is not None else ()
    exchanged = bring_pieces(held, recut.pieces(recut.layout()), is_verified=is_verified)
    recut.filled()
    return exchanged


def _report(resized: ResizedSession) -> None:
    """Write an event that says how the job's size has changed; rank 0 also logs the event. Collective."""
    now = generation()
    assert now is not None
    roster = now.roster
    moments = all_gather_objects(
        (now.interrupted_at, resized.usable_at, resized.brought_at, time.time()),
        tuple[float | None, float, float, float],
    )
    interrupted_at, usable_at, brought_at, resumed_at = zip(*moments, strict=True)
    deaths = (*roster.earlier, *roster.deaths)  # ``earlier``: deaths from which the job had not recovered
    began_at = min([*(death.at for death in deaths), *filter(None, interrupted_at)], default=min(usable_at))
    lost = ", ".join(f"rank {death.rank} (pid {death.pid}) {death.how}" for death in deaths if death.rank is not None)
    event = ResizedEvent(
        iteration=resized.until,
        world_before=resized.world_before,
        world_size=dist.get_world_size(),
        lost=lost,
        moved_bytes=resized.exchanged.moved_bytes,
        digests_equal=len(resized.exchanged.digests),
        seconds={
            "until_usable": max(usable_at) - began_at,
            "state": max(brought_at) - max(usable_at),
            "until_resumed": max(resumed_at) - max(brought_at),
            "total": max(resumed_at) - began_at,
        },
    )
    if dist.get_rank() == 0:
        log.info(event.sentence())
    if (record := resized.session.binding.record) is not None:
        record.event(event)
