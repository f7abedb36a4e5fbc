"""Ranks of the job come back from sparse snapshots: those of the stages that lost their state, or all of them.

report -> plan -> fetch -> replay -> verify. Every rank calls :func:`recover` at the same point; what any of them finds
wrong, all of them raise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist

from megatron.moevement.optimizer.views import OperatorViews
from megatron.moevement.restart import in_process as restart
from megatron.moevement.runtime.boundary import boundary_copy
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.ranks import tell_all
from megatron.moevement.runtime.replay import Alone, MegatronTrainer
from megatron.moevement.runtime.replicas import Replicas, replica_digests, unequal_replicas
from megatron.moevement.runtime.wiring import Wiring
from moevement_core.boundary_log import Direction
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.errors import RecoveryError
from moevement_core.operators import EMBEDDING
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.feed import feed
from moevement_core.recovery.fetch import fetch
from moevement_core.recovery.outcome import Recovery
from moevement_core.recovery.plan import Fetch, Holding, RecoveryPlan, Report, Source, plan_recovery
from moevement_core.recovery.replay import replay
from moevement_core.recovery.scope import Pipeline, neighbours_of, segments
from moevement_core.replication.transport import Transport
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.snapshot import Snapshot


class Shelf(Protocol):
    """Somewhere a rank has snapshots: its memory, or files."""

    def holdings(self) -> Sequence[Holding]:
        """All that are whole."""

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """One of them; nothing if it is gone meanwhile."""


@dataclass(frozen=True)
class Parts:
    """What a recovery needs of a rank."""

    job: Job
    wiring: Wiring
    views: OperatorViews
    checkpointer: Checkpointer


class MemoryShelf:
    """Snapshots in this rank's host memory: its own, and those that it keeps for others."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def holdings(self) -> list[Holding]:
        """All that are whole: every byte of them is checked."""
        own = [(Source.MEMORY, snapshot) for snapshot in self._checkpointer.own.snapshots().values()]
        kept = [
            (Source.PEER, snapshot)
            for store in self._checkpointer.replicator.stores
            for snapshot in store.snapshots().values()
        ]
        return [holding_of(snapshot, source) for source, snapshot in own + kept if snapshot.damaged() is None]

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """One of them; nothing if it is gone meanwhile."""
        if source is Source.MEMORY:
            return self._checkpointer.own.snapshots().get(iteration)
        stores = (store for store in self._checkpointer.replicator.stores if store.source == owner)
        return next((store.snapshots().get(iteration) for store in stores), None)


def holding_of(snapshot: Snapshot, source: Source) -> Holding:
    """How a snapshot is reported."""
    header = snapshot.header
    return Holding(header.rank, header.iteration, header.state, header.schedule, header.contents, source)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Plans, one for each segment of stages that replay together, and the snapshots of this rank, checked."""

    plans: tuple[RecoveryPlan, ...]
    mine: RecoveryPlan | None
    """Of this rank's stage; nothing if it keeps its state."""
    snapshots: Mapping[int, Snapshot]
    outcomes: Mapping[int, Any]
    """What came of recent iterations, from ranks of the same model replica."""
    fetch_s: float


@dataclass(frozen=True)
class Scope:
    """What was lost."""

    pipeline: Pipeline
    lost: frozenset[int]
    """Stages without their state."""
    left_out: Collection[int]
    """Iterations that never ran: nothing was sent in them."""

    @property
    def feeding(self) -> set[int]:
        """Stages that keep their state and feed those that replay."""
        replaying = segments(self.pipeline, self.lost)
        return {stage for segment in replaying for stage in neighbours_of(self.pipeline, segment)}


def prepare(
    report: Report,
    shelves: Mapping[Source, Shelf],
    until: int | None,
    transport: Transport | None,
    scope: Scope | None = None,
) -> Prepared:
    """Plan from what every rank has, fetch it, and plan anew without what could not be had; every rank calls it.

    Args:
        report: what this rank has, but for its snapshots.
        shelves: where those are, by source.
        until: the iteration to reach; nothing for the first dense state that the snapshots give.
        transport: between ranks.
        scope: the stages to roll back; nothing for all.

    Raises:
        RecoveryError: there is no way back. On every rank alike.
    """
    began = time.perf_counter()
    distinct = {id(shelf): shelf for shelf in shelves.values()}
    holdings = tuple(holding for shelf in distinct.values() for holding in shelf.holdings())
    reports = tell_all(replace(report, holdings=holdings))
    while True:
        plans = _plans(reports, until, scope)
        snapshots: dict[int, Snapshot] = {}
        missing: list[Fetch] = []
        for plan in plans:
            fetched = fetch(
                report.rank, plan,
                lambda source, owner, iteration: shelves[source].open(source, owner, iteration), transport,
            )  # fmt: skip
            missing += [one for one in fetched.values() if isinstance(one, Fetch)]
            snapshots |= {iteration: one for iteration, one in fetched.items() if isinstance(one, Snapshot)}
        failed = {one for its in tell_all(missing) for one in its}
        if not failed:
            mine = next((plan for plan in plans if report.stage in plan.runs), None)
            return Prepared(plans, mine, snapshots, _agreed_outcomes(reports, report), time.perf_counter() - began)
        if report.rank == 0:
            print(f"moevement: {len(failed)} snapshots could not be had where they were said to be; planning again")
        reports = [_without(one, failed) for one in reports]


def _plans(reports: Sequence[Report], until: int | None, scope: Scope | None) -> tuple[RecoveryPlan, ...]:
    """One for each segment; or, if a segment cannot be recovered alone, one for all stages."""
    if scope is not None and len(scope.lost) < scope.pipeline.stages:
        try:
            plans = [plan_recovery(reports, until, segment) for segment in segments(scope.pipeline, scope.lost)]
            for plan in plans:
                _check_logs(reports, plan, scope)
                _check_outcomes(reports, plan, scope)
            return tuple(plans)
        except RecoveryError as error:
            if dist.get_rank() == 0:
                print(f"moevement: all stages roll back, because {error}", flush=True)
    return (plan_recovery(reports, until),)


def _check_logs(reports: Sequence[Report], plan: RecoveryPlan, scope: Scope) -> None:
    """Every neighbour of the segment can feed it all that it needs."""
    feeding = neighbours_of(scope.pipeline, frozenset(plan.runs))
    needed = set(plan.iterations) - set(scope.left_out)
    for report in reports:
        if report.stage in feeding and (gone := needed - set(report.logged)):
            raise RecoveryError(
                f"rank {report.rank} has no log of what it sent in iteration {min(gone)}, which stage "
                f"{', '.join(map(str, sorted(plan.runs)))} needs to replay alone"
            )


def _check_outcomes(reports: Sequence[Report], plan: RecoveryPlan, scope: Scope) -> None:
    """What came of every step is known: a stage alone cannot work out norms and overflows, which span all stages."""
    needed = set(plan.iterations) - set(scope.left_out)
    for report in reports:
        if report.stage not in plan.runs:
            continue
        records = {fetch.iteration for fetch in plan.fetches if fetch.owner == report.rank}
        if gone := needed - records - _outcomes(reports, report).keys():
            raise RecoveryError(
                f"nobody of rank {report.rank}'s model replica remembers what came of iteration {min(gone)}, which "
                f"stage {report.stage} needs to replay alone"
            )


def _agreed_outcomes(reports: Sequence[Report], mine: Report) -> Mapping[int, Any]:
    """What this rank's replica remembers of iterations that every replica remembers.

    The others are worked out again by all ranks: one that took a norm from a record would not take part in the
    reduction by which the rest works it out. Without a pipeline a replica that is lost has nobody who remembers.
    """
    known: dict[int, set[int]] = {}
    for report in reports:
        known.setdefault(report.replica, set()).update(report.outcomes)
    common = set.intersection(*known.values())
    return {iteration: outcome for iteration, outcome in _outcomes(reports, mine).items() if iteration in common}


def _outcomes(reports: Sequence[Report], mine: Report) -> Mapping[int, Any]:
    """What ranks of this rank's model replica remember: they clipped by the same norm."""
    found: dict[int, Any] = {}
    for report in reports:
        if report.replica == mine.replica:
            found |= report.outcomes
    return found


def carry_out(parts: Parts, prepared: Prepared) -> Recovery:
    """Replay what was prepared and compare; every rank calls it, inside Megatron's training loop.

    Stages that keep their state feed those that replay, and wait.

    Raises:
        RecoveryError: what came back is not what was lost (on every rank alike), or a snapshot is of another model.
    """
    began, began_cpu = time.perf_counter(), time.process_time()
    plan = prepared.mine
    everywhere = len(prepared.plans) == 1 and set(prepared.plans[0].runs) == set(range(parts.wiring.pipeline.stages))
    shared_from = _shared_from(parts, plan)
    check = StateCheck({o.name: s for o, s in parts.views.states.items()}, parts.checkpointer.capturer.whole_now)
    replayed: list[int] = []

    def tell(iteration: int, frozen: int) -> None:
        replayed.append(iteration)
        if plan is not None and parts.wiring.speaks_for_stage and parts.wiring.stage == min(plan.runs):
            operators = len(parts.wiring.table)
            active = f"{operators - frozen} of {operators} operators of stage {parts.wiring.stage} active"
            print(f"moevement: replaying iteration {iteration} of {plan.until}, {active}", flush=True)

    def keep(iteration: int, record: Mapping[str, Any]) -> None:
        """Take the snapshots again that died with a rank, and those of windows that were under way."""
        checkpointer = parts.checkpointer
        if iteration in checkpointer.own.snapshots():
            return
        if iteration in prepared.snapshots:
            checkpointer.adopt(prepared.snapshots[iteration])
        elif "step" in record and checkpointer.takes(iteration):
            checkpointer.take(iteration, {"boundary": boundary_copy(parts.job), "iteration": record})
            checkpointer.wait()

    if plan is not None:
        checkpointer = parts.checkpointer
        for iteration in range(plan.first, plan.runs[parts.wiring.stage].last):
            # A window of another strategy, from disk, does not fit into the few buffers of dense snapshots.
            if checkpointer.takes(iteration) or not checkpointer.history.oldest.is_dense:
                checkpointer.adopt(prepared.snapshots[iteration])
    feeders = [] if everywhere else _start_feeders(parts, prepared)
    if plan is not None:
        alone = None if everywhere else Alone(parts.wiring.neighbours, frozenset(plan.runs), parts.wiring.feeds)
        trainer = MegatronTrainer(parts.job, parts.views, shared_from, alone)
        with trainer.replaying(), restart.working():
            replay(
                plan, parts.wiring.stage, parts.wiring.table.names, prepared.snapshots, trainer, check, tell,
                prepared.outcomes, keep,
            )  # fmt: skip
    for feeder in feeders:
        feeder.finish()
    first, until = min(one.first for one in prepared.plans), max(one.until for one in prepared.plans)
    known_until = check.known_until if plan is not None else until
    recovery = Recovery(
        first, until, len(replayed), known_until, known_until, len(check.recomputed), len(check.restored),
        check.losses_until, len(check.sends),
        _sum_sources(prepared.plans), {str(parts.wiring.stage): len(replayed)},
        sum(feeder.fed_bytes for feeder in feeders),
        prepared.fetch_s, time.perf_counter() - began, time.process_time() - began_cpu,
    )  # fmt: skip
    return _agreed(recovery, check.differences, replica_digests(parts.job))


def _sum_sources(plans: Sequence[RecoveryPlan]) -> dict[str, int]:
    return {source.name.lower(): sum(plan.sources()[source] for plan in plans) for source in Source}


class _Feeder(threading.Thread):
    """Feeds one neighbour in one direction."""

    def __init__(self, parts: Parts, peer: int, direction: Direction, iterations: Sequence[int]) -> None:
        super().__init__(name=f"moevement-feed-{peer}-{direction.name.lower()}", daemon=True)
        self.fed_bytes = 0
        self._error: Exception | None = None
        self._parts, self._peer, self._direction, self._iterations = parts, peer, direction, iterations
        self.start()

    def run(self) -> None:
        log, transport = self._parts.job.boundary_log, self._parts.wiring.feeds
        assert log is not None
        assert transport is not None
        try:
            self.fed_bytes = feed(
                self._parts.wiring.rank, self._peer, self._direction, self._iterations, log, transport
            )
        except Exception as error:  # shown on the training thread
            self._error = error

    def finish(self) -> None:
        """Wait until everything is fed.

        Raises:
            Exception: it could not be; the one that is fed has died, maybe.
        """
        self.join()
        if self._error is not None:
            raise self._error


def _start_feeders(parts: Parts, prepared: Prepared) -> list[_Feeder]:
    """One for each neighbour that replays, if this rank does not."""
    if prepared.mine is not None:
        return []
    feeders = []
    for neighbour, direction in (
        (parts.wiring.neighbours.after, Direction.FORWARD),
        (parts.wiring.neighbours.before, Direction.BACKWARD),
    ):
        for plan in prepared.plans:
            if neighbour is not None and neighbour.stage in plan.runs:
                feeders.append(_Feeder(parts, neighbour.rank, direction, plan.iterations))
    return feeders


def _without(report: Report, failed: set[Fetch]) -> Report:
    gone = {(one.holder, one.source, one.owner, one.iteration) for one in failed}
    kept = [h for h in report.holdings if (report.rank, h.source, h.owner, h.iteration) not in gone]
    return replace(report, holdings=tuple(kept))


def _shared_from(parts: Parts, plan: RecoveryPlan | None) -> int | None:
    """The first iteration in which any copy of an embedding is active; None without copies on several stages."""
    if not parts.wiring.pipeline.tied:
        return None
    index = parts.wiring.table.index_of.get(EMBEDDING)
    mine = None if index is None or plan is None else int(plan.runs[parts.wiring.stage].full_at[index]) + 1
    return min((active_from for active_from in tell_all(mine) if active_from is not None), default=None)


def _agreed(recovery: Recovery, differences: list[str], replicas: list[Replicas]) -> Recovery:
    """The recovery as all ranks together have it.

    Each rank that replayed has compared the part of the state that it saves; ``replicas`` say whether what ranks bring
    to each other is the same on all, on those too that kept their state.

    Raises:
        RecoveryError: any of them found a difference.
    """
    everyones = tell_all((recovery, differences, replicas))
    found = [f"rank {rank}: {what}" for rank, (_, its, _) in enumerate(everyones) for what in its]
    found += unequal_replicas([its for _, _, its in everyones])
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise RecoveryError(
            f"the replayed state is not the one that was lost: {'; '.join(found[:5])}{more}. Nothing of it may be "
            "used: start again from a dense checkpoint or an older window"
        )
    known = min(NONE if one.restored_until is None else one.restored_until for one, *_ in everyones)
    recomputed = sum(one.recomputed for one, *_ in everyones)
    losses = max(one.losses_until for one, *_ in everyones)
    by_stage: dict[str, int] = {}
    for one, *_ in everyones:
        for stage, count in one.replayed_by_stage.items():
            by_stage[stage] = max(count, by_stage.get(stage, 0))
    return replace(
        recovery,
        replayed=max(one.replayed for one, *_ in everyones),
        replayed_by_stage=dict(sorted(by_stage.items(), key=lambda item: int(item[0]))),
        fed_bytes=sum(one.fed_bytes for one, *_ in everyones),
        verified_until=None if known == NONE or not recomputed else known,
        restored_until=None if known == NONE else known,
        recomputed=recomputed,
        restored=sum(one.restored for one, *_ in everyones),
        losses_until=None if losses == NONE else losses,
        sends=max(one.sends for one, *_ in everyones),
        fetch_s=max(one.fetch_s for one, *_ in everyones),
        replay_s=max(one.replay_s for one, *_ in everyones),
        replay_cpu_s=sum(one.replay_cpu_s for one, *_ in everyones),
    )
