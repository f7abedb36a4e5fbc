"""Report of a completed recovery, for the log and the record of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.rebuild.survivors import SurvivorChecks
from moevement_core.rendezvous.roster import Death, NoticedBy
from moevement_core.restart.generation import generation
from moevement_core.restart.leaving import LeavingPhase
from moevement_core.run.account import Account
from moevement_core.run.events import GroupsSplit
from moevement_core.run.outcome import Recovery
from moevement_core.session.session import Session
from moevement_core.topology.topology import Topology
from moevement_core.util.words import counted


@dataclass(frozen=True, slots=True)
class Times:
    """Moments at which steps of one rank's recovery began or ended, in seconds since the epoch."""

    usable_at: float
    """Time at which the new process groups were usable."""
    prepared_at: float
    """Time at which the rank had its plan and snapshots."""
    replay_at: float
    """Time at which the replay began."""
    resumed_at: float
    """Time at which all state was restored and compared."""


_Told = tuple[float, float, float, float, float, float, int, dict[str, float], int | None]


def report_failure(
    session: Session, until: int, lost: frozenset[int], recovery: Recovery | None, kept: SurvivorChecks, times: Times
) -> None:
    """Log what failed and how it was recovered, and record this as an event of the run. Every rank calls it.

    Args:
        session: session of this rank.
        until: iteration whose state training resumes from.
        lost: pipeline stages that lost their state.
        recovery: summary of the recovery; None if no stage lost its state.
        kept: result of the checks of the state that survivors kept.
        times: times of this rank's recovery.
    """
    now = generation()
    assert now is not None
    local = (
        now.interrupted_at, times.usable_at, times.prepared_at, times.replay_at, times.resumed_at,
        session.saving.windows.iteration_s, session.saving.copies_missing, dict(now.left_in), now.free_before,
    )  # fmt: skip
    *moments, iteration_s, missing, left_in, free_bytes = zip(*all_gather_objects(local, _Told), strict=True)
    interrupted_at, usable_at, prepared_at, replay_at, resumed_at = (max(times) for times in moments)
    roster = now.roster
    failed_at = min((_lost_at(death) for death in roster.deaths), default=interrupted_at)
    account = Account(
        generation=roster.generation,
        failures=[_failure(death) for death in roster.deaths] or list(roster.reasons),
        noticed_by=_noticed_by(roster.deaths),
        failed_at=failed_at,
        interrupted_at=max(interrupted_at, failed_at),
        left_at=max(roster.left_at, interrupted_at),
        formed_at=roster.formed_at,
        usable_at=usable_at,
        prepared_at=prepared_at,
        replay_at=replay_at,
        resumed_at=resumed_at,
        scope=_scope(session.saving.topology, lost, recovery),
        recovery=recovery.as_dict() if recovery is not None else None,
        effective=_effective(until - session.saving.began_at, max(iteration_s), resumed_at, roster.first_committed_at),
        kept=str(kept),
        survivors=kept.summary,
        spares=roster.spares,
        starting=roster.starting,
        copies=f"{counted(sum(missing), 'snapshot')} still to be copied to peers" if sum(missing) else "complete",
        earlier=[_failure(death) for death in roster.earlier],
        first_failed_at=min(map(_lost_at, roster.earlier), default=None),
        leaving=_slowest(left_in),
        free_bytes=min((free for free in free_bytes if free is not None), default=None),
    )
    if dist.get_rank() == 0:
        for line in account.lines():
            session.saving.reports.log(line)
    session.saving.reports.event(account)
    if roster.split:
        session.saving.reports.event(GroupsSplit(roster.split, roster.split_nodes))


def _effective(iterations: int, iteration_s: float, now: float, first_committed_at: float | None) -> float | None:
    """Return the effective training time ratio so far; None before the first commit is known.

    Args:
        iterations: number of committed iterations, each counted once.
        iteration_s: duration of an iteration in seconds.
        now: time at which training resumes, in seconds since the epoch.
        first_committed_at: time of the job's first commit, in seconds since the epoch. The first iteration began one
            iteration earlier.
    """
    if first_committed_at is None or not iterations or not iteration_s:
        return None
    return min(1.0, iterations * iteration_s / (now - first_committed_at + iteration_s))


def _slowest(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return how long the slowest rank took for each :class:`LeavingPhase` when ranks left the last generation."""
    return {phase: max(of_rank.get(phase, 0.0) for of_rank in seconds) for phase in map(str, LeavingPhase)}


def _lost_at(death: Death) -> float:
    """Return the time of a failure, in seconds since the epoch.

    If nothing observed the end of the process, this is the time of the last sign of life from it.
    """
    return (
        death.at if death.noticed_by in (NoticedBy.SUPERVISOR, NoticedBy.DEVICE, NoticedBy.DRAIN) else death.last_seen
    )


_NOTICED = {
    NoticedBy.SUPERVISOR: "supervisor, which saw the process end",
    NoticedBy.RESET: "reset of the supervisor's connection",
    NoticedBy.LEASE: "lease that ran out",
    NoticedBy.TIMEOUT: "timeout: the process did not answer",
    NoticedBy.RESULT: "result that was not finite",
    NoticedBy.DEVICE: "device: its process gave the rank back",
    NoticedBy.DRAIN: "drain: its process gave the rank back, as the user asked",
}


def _noticed_by(deaths: Sequence[Death]) -> str:
    """Return in words what detected the failures, with the longest time that each detector needed for it."""
    if not deaths:
        return "by a surviving rank: an error on that rank, or no progress for the hang timeout"
    slowest: dict[str, float] = {}
    for death in deaths:
        seconds = death.at - _lost_at(death)
        slowest[death.noticed_by] = max(seconds, slowest.get(death.noticed_by, 0.0))
    return "by " + ", ".join(f"{_NOTICED[NoticedBy(by)]} ({seconds:.1f} s)" for by, seconds in slowest.items())


def _failure(death: Death) -> str:
    process = f"rank {death.rank}" if death.rank is not None else "a spare"
    return f"{process} (pid {death.pid}) {death.how}"


def _scope(topology: Topology, lost: frozenset[int], recovery: Recovery | None) -> str:
    stages = topology.pipeline.stages
    if recovery is None:
        return f"none of {stages} stages lost its state"
    names = ", ".join(str(stage) for stage in sorted(lost))
    has_all = len(recovery.ranks) == topology.world
    if recovery.redone and not recovery.replayed and not has_all:
        return f"stage {names} of {stages}: {recovery.scope} lost state and restored it; all others kept their state"
    if has_all and len(lost) < stages:
        return f"stage {names} of {stages} lost its state; all stages rolled back"
    return f"stage {names} of {stages} lost its state; {'all stages' if has_all else 'no other stage'} rolled back"
