"""Preparation of a recovery on every rank: report, plan and fetch, repeated until all planned snapshots are there."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.codec import Plain
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.comms.transport import Transport
from moevement_core.errors import RecoveryError
from moevement_core.recovery import flips
from moevement_core.recovery.fetch import fetch
from moevement_core.recovery.holdings import Fetch, Source
from moevement_core.recovery.plan import RecoveryPlan, Report, plan_from_replicas, plan_recovery, plan_redo
from moevement_core.recovery.scope import Pipeline, neighbours_of, segments
from moevement_core.recovery.sources import SnapshotSource
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.trainer.equal_bits import placed_since, why_replay_may_differ
from moevement_core.util.words import counted

ATTEMPTS = 3
"""Number of attempts to fetch a snapshot that arrives damaged."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Result of a preparation: a plan for each segment of stages that replay together, and this rank's snapshots.

    The snapshots were checked when they were fetched.
    """

    plans: tuple[RecoveryPlan, ...]
    own_plan: RecoveryPlan | None
    """Plan of this rank; None if it keeps its state."""
    snapshots: Mapping[int, Snapshot]
    outcomes: Mapping[int, Any]
    """Outcomes of recent iterations, from the ranks of this rank's model replica."""
    fetch_s: float
    is_comparable: bool = True
    """True if the recovered state is to be compared with digests of the lost state.

    False if fewer or more ranks re-execute iterations than executed them first, because sums over ranks then add in
    another order.
    """
    other_arithmetic: str = ""
    """Reason, in words, why the recovered state may differ in last bits from the lost state; empty without a reason.

    If there is a reason, ranks report a difference instead of failing. They also capture the snapshots of replayed
    iterations again, because a window must not mix snapshots of the lost state and of the recovered state.
    """
    keeps_first: bool = True
    """True if this rank keeps the snapshots that the replay began from, so that a later recovery can use them.

    False if these snapshots were captured on other processors, where results may differ in last bits. A later replay
    on the present processors might not reproduce the digests in the snapshots.
    """
    placed_since: int | None = None
    """Iteration since which no rank has moved to another node or device; None if no rank knows one."""
    other_data: Sequence[str] = ()
    """Data flags, in words, in which this job differs from the job that wrote the loaded window; empty without one."""


@dataclass(frozen=True)
class Scope:
    """Stages and ranks that lost their state."""

    pipeline: Pipeline
    lost: frozenset[int]
    """Stages that lost their state."""
    left_out: Collection[int]
    """Iterations that the job never executes (``--iterations-to-skip``), so ranks have no logs of them."""
    owners: Collection[int]
    """Ranks of all stages that replay with :attr:`lost`, and ranks whose snapshots recompute theirs by parity."""

    @property
    def feeding(self) -> set[int]:
        """Stages that keep their state and feed those that replay."""
        replaying = segments(self.pipeline, self.lost)
        return {stage for segment in replaying for stage in neighbours_of(self.pipeline, segment)}


def prepare(
    report: Report,
    sources: Mapping[Source, SnapshotSource],
    until: int | None,
    transport: Transport | None,
    scope: Scope | None = None,
    lost_ranks: Collection[int] = (),
    *,
    outcomes: Mapping[int, Any] | None = None,
    may_redo: bool = True,
) -> Prepared:
    """Plan a recovery from the reports of all ranks, and fetch its snapshots. Every rank calls it.

    If a snapshot cannot be fetched, the ranks plan again without it. Ranks report all their snapshots only if all
    stages roll back. Otherwise they report the snapshots of the lost stages, a share of 1 / stages.

    Args:
        report: report of this rank, without its snapshots.
        sources: sources of this rank's snapshots, by kind.
        until: iteration whose state is recovered; None for the newest dense state that snapshots lead to.
        transport: channel between ranks for fetches; None for a single rank.
        scope: stages to roll back; None for all stages.
        lost_ranks: ranks that lost their state, so that the recovery may restore these alone. Other ranks of the same
            stages may have kept their state. Empty if the recovery has to restore whole stages.
        outcomes: recorded outcomes of recent steps on this rank, by iteration.
        may_redo: True if failed ranks may repeat their updates from logged gradients.

    Raises:
        RecoveryError: the state is unrecoverable. Every rank raises it.
    """
    began = time.perf_counter()
    of_sums, unavailable, asked_again = sources.get(Source.PARITY), set[Fetch](), 0
    while True:
        reports, plans = _reports_and_plans(
            report, sources, until=until, scope=scope, lost_ranks=lost_ranks, unavailable=unavailable, may_redo=may_redo
        )
        flips.at_plans(report.rank, plans, sources)
        snapshots: dict[int, Snapshot] = {}
        missing: list[Fetch] = []
        for plan in plans:
            fetched = fetch(
                rank=report.rank, plan=plan,
                open_=lambda which, owner, iteration: sources[which].open(which, owner, iteration), transport=transport,
                open_sum=of_sums.open_sum if of_sums is not None else lambda *which: None,
            )  # fmt: skip
            missing += [result for result in fetched.values() if isinstance(result, Fetch)]
            snapshots |= {iteration: result for iteration, result in fetched.items() if isinstance(result, Snapshot)}
        failed = {fetch for per_rank in all_gather_objects(missing, list[Fetch]) for fetch in per_rank}
        if not failed:
            own_plan = next((plan for plan in plans if report.rank in plan.ranks), None)
            return Prepared(
                plans, own_plan, snapshots=snapshots, outcomes=_share_outcomes(reports, report, outcomes or {}),
                fetch_s=time.perf_counter() - began, other_arithmetic=why_replay_may_differ(reports, plans),
                placed_since=placed_since(reports),
            )  # fmt: skip
        if report.rank == 0:
            log.warning(
                f"{counted(len(failed), 'snapshot')} could not be fetched from the reported places; ranks plan again"
            )
        asked_again += 1
        unavailable |= _gone(failed, asked_again)


def _reports_and_plans(
    report: Report,
    sources: Mapping[Source, SnapshotSource],
    until: int | None,
    scope: Scope | None,
    lost_ranks: Collection[int],
    unavailable: Collection[Fetch],
    *,
    may_redo: bool,
) -> tuple[list[Report], tuple[RecoveryPlan, ...]]:
    """Return the reports of all ranks, and the plans of the recovery that makes the fewest ranks repeat work.

    Collective. Ranks first look for plans that restore the lost stages alone. If there are none, they report the rest
    of their snapshots, and all stages roll back.

    Raises:
        RecoveryError: the state is unrecoverable. Every rank raises it.
    """
    if scope is not None and len(scope.lost) < scope.pipeline.stages:
        reports = _report_to_all(report, sources, unavailable, scope.owners)
        if (plans := _plans_of_lost(reports, until, scope, lost_ranks, may_redo=may_redo)) is not None:
            return reports, plans
    reports = _report_to_all(report, sources, unavailable)
    if (plan := _plan_of_ranks(reports, until, lost_ranks, may_redo=may_redo)) is None:
        plan = plan_recovery(reports, until)
    return reports, (plan,)


def _report_to_all(
    report: Report,
    sources: Mapping[Source, SnapshotSource],
    unavailable: Collection[Fetch],
    owners: Collection[int] | None = None,
) -> list[Report]:
    """Exchange reports on the snapshots that ranks hold now, and return the reports by rank. Collective.

    Holdings change between calls: a rank may drop a snapshot as soon as its peers have it.

    Args:
        report: report of this rank, without its snapshots.
        sources: sources of this rank's snapshots, by kind.
        unavailable: fetches that have failed; the reports leave out the snapshots that these were to read.
        owners: ranks whose snapshots ranks report; None for all ranks.
    """
    distinct = {id(source): source for source in sources.values()}.values()
    holdings = (holding for source in distinct for holding in source.holdings())
    own = replace(
        report,
        holdings=tuple(holding for holding in holdings if owners is None or holding.owner in owners),
        summed=tuple(sum_ for source in distinct for sum_ in source.summed()),
    )
    return [_without(other, unavailable) for other in all_gather_objects(own, Report)]


def _plan_of_ranks(
    reports: Sequence[Report], until: int | None, lost_ranks: Collection[int], *, may_redo: bool
) -> RecoveryPlan | None:
    """Return the plan that restores the failed ranks alone, from live replicas or by redo; None without one."""
    if until is None:
        return None
    if (from_replicas := plan_from_replicas(reports, until, lost_ranks)) is not None:
        return from_replicas
    return plan_redo(reports, until, lost_ranks) if may_redo and lost_ranks else None


def _plans_of_lost(
    reports: Sequence[Report], until: int | None, scope: Scope, lost_ranks: Collection[int], *, may_redo: bool
) -> tuple[RecoveryPlan, ...] | None:
    """Return the plans that restore the lost stages alone, or the failed ranks alone; None if that is not possible.

    There is a plan for each segment of stages that replay together.
    """
    if (plan := _plan_of_ranks(reports, until, lost_ranks, may_redo=may_redo)) is not None:
        return (plan,)
    try:
        plans = tuple(plan_recovery(reports, until, segment) for segment in segments(scope.pipeline, scope.lost))
        for plan in plans:
            _check_logs(reports, plan, scope)
            _check_outcomes(reports, plan, scope)
    except RecoveryError as error:
        if dist.get_rank() == 0:
            log.warning(f"all stages roll back, because {error}")
        return None
    return plans


def _check_logs(reports: Sequence[Report], plan: RecoveryPlan, scope: Scope) -> None:
    """Check that the logs of all healthy neighbours cover the iterations that the stages of ``plan`` replay.

    Raises:
        RecoveryError: a neighbour has no log of one of the iterations.
    """
    feeding = neighbours_of(scope.pipeline, frozenset(plan.runs))
    needed = set(plan.iterations) - set(scope.left_out)
    for report in reports:
        if report.stage in feeding and (unlogged := needed - set(report.logged)):
            raise RecoveryError(
                f"rank {report.rank} has no log of the activations and gradients that it sent in iteration "
                f"{min(unlogged)}; without them stage {', '.join(map(str, sorted(plan.runs)))} cannot replay alone"
            )


def _check_outcomes(reports: Sequence[Report], plan: RecoveryPlan, scope: Scope) -> None:
    """Check that the replaying ranks know the outcome (gradient norm, skipped or not) of every replayed iteration.

    Gradient norms and overflows span all stages, so a stage that replays alone cannot compute them.

    Raises:
        RecoveryError: no rank of a replaying rank's model replica has the outcome of one of the iterations.
    """
    needed, recorded = set(plan.iterations) - set(scope.left_out), dict[int, set[int]]()
    for report in reports:
        recorded.setdefault(report.replica, set()).update(report.outcomes)
    for report in reports:
        if report.stage not in plan.runs:
            continue
        records = {fetch.iteration for fetch in plan.fetches if fetch.owner == report.rank}
        if unknown := needed - records - recorded[report.replica]:
            raise RecoveryError(
                f"no rank in the model replica of rank {report.rank} has the outcome (gradient norm, skipped or not) "
                f"of iteration {min(unknown)}; without this outcome, stage {report.stage} cannot replay alone"
            )


def _share_outcomes(reports: Sequence[Report], own: Report, outcomes: Mapping[int, Any]) -> Mapping[int, Any]:
    """Return the recorded outcomes of this rank's model replica, for iterations that every replica has recorded.

    Collective. For all other iterations, the ranks of all replicas compute the gradient norm together, in a reduction.
    A rank that took the norm from a record instead would leave the others waiting in this reduction. Some replicas may
    have no records: without a pipeline, all records of a failed rank's replica are lost.

    One rank of a replica, the last with a record of the iteration, sends the outcome for the replica.
    """
    recorded: dict[int, dict[int, int]] = {}
    for report in reports:
        recorded.setdefault(report.replica, {}).update(dict.fromkeys(report.outcomes, report.rank))
    common = set.intersection(*(set(by_iteration) for by_iteration in recorded.values()))
    senders = recorded[own.replica]
    local = {iteration: outcomes[iteration] for iteration in sorted(common) if senders[iteration] == own.rank}
    sent: list[Plain] = all_gather_objects(Plain(local), Plain)
    known = {iteration: sent[sender].value for iteration, sender in senders.items() if iteration in common}
    return {iteration: by_iteration[iteration] for iteration, by_iteration in sorted(known.items())}


def _gone(failed: set[Fetch], attempt: int) -> set[Fetch]:
    """Return the fetches that failed for good; ranks plan again without the snapshots that these were to read.

    A snapshot that was damaged on the way is still intact at its source, so ranks fetch it again, up to
    :data:`ATTEMPTS` times in all.
    """
    return {fetch for fetch in failed if not fetch.was_sent or attempt >= ATTEMPTS}


def _without(report: Report, failed: Collection[Fetch]) -> Report:
    if not failed:
        return report
    unavailable = {(fetch.holder, fetch.source, fetch.owner, fetch.iteration) for fetch in failed}
    damaged = {(fetch.holder, fetch.source, fetch.iteration) for fetch in failed}
    kept = [h for h in report.holdings if (report.rank, h.source, h.owner, h.iteration) not in unavailable]
    sums = [sum_ for sum_ in report.summed if (report.rank, Source.PARITY, sum_.iteration) not in damaged]
    gone_live = {fetch.owner for fetch in failed if (fetch.holder, fetch.source) == (report.rank, Source.REPLICA)}
    stands_for = {rank: count for rank, count in report.stands_for.items() if rank not in gone_live}
    return replace(report, holdings=tuple(kept), summed=tuple(sums), stands_for=stands_for)
