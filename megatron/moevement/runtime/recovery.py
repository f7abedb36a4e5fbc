"""All ranks of the job come back together from sparse snapshots: the global path.

report -> plan -> fetch -> replay -> verify. Every rank calls :func:`recover` at the same point; what any of them finds
wrong, all of them raise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist

from megatron.moevement.optimizer.views import OperatorViews
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.replay import MegatronTrainer
from moevement_core.errors import RecoveryError
from moevement_core.operators import EMBEDDING, OperatorTable
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.fetch import fetch
from moevement_core.recovery.outcome import Recovery
from moevement_core.recovery.plan import Fetch, Holding, RecoveryPlan, Report, Source, plan_recovery
from moevement_core.recovery.replay import replay
from moevement_core.replication.transport import Transport
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.checkpointer import Checkpointer
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
    rank: int
    stage: int
    table: OperatorTable
    views: OperatorViews
    checkpointer: Checkpointer


class MemoryShelf:
    """Snapshots in this rank's host memory: its own, and those that it keeps for others."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def holdings(self) -> list[Holding]:
        """All that are whole: every byte of them is checked."""
        own = [(Source.MEMORY, snapshot) for snapshot in self._checkpointer.snapshots().values()]
        kept = [
            (Source.PEER, snapshot) for keeper in self._checkpointer.keepers for snapshot in keeper.snapshots().values()
        ]
        return [holding_of(snapshot, source) for source, snapshot in own + kept if snapshot.damaged() is None]

    def open(self, source: Source, owner: int, iteration: int) -> Snapshot | None:
        """One of them; nothing if it is gone meanwhile."""
        if source is Source.MEMORY:
            return self._checkpointer.snapshots().get(iteration)
        keepers = (keeper for keeper in self._checkpointer.keepers if keeper.source == owner)
        return next((keeper.snapshots().get(iteration) for keeper in keepers), None)


def holding_of(snapshot: Snapshot, source: Source) -> Holding:
    """How a snapshot is reported."""
    header = snapshot.header
    return Holding(header.rank, header.iteration, header.state, header.schedule, header.contents, source)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan and the snapshots of this rank that it needs, checked."""

    plan: RecoveryPlan
    snapshots: Mapping[int, Snapshot]
    fetch_s: float


def recover(parts: Parts, shelves: Mapping[Source, Shelf], until: int, transport: Transport | None) -> Recovery:
    """Bring the state of iteration ``until`` back on every rank, from whatever is in live memory now.

    Args:
        parts: this rank's.
        shelves: where snapshots are, by source.
        until: the iteration.
        transport: between ranks.

    Raises:
        RecoveryError: there is no way back, or what came back is not what was lost. On every rank alike.
    """
    parts.checkpointer.settle()
    return carry_out(parts, prepare(parts.rank, parts.stage, shelves, until, transport))


def prepare(
    rank: int, stage: int, shelves: Mapping[Source, Shelf], until: int | None, transport: Transport | None
) -> Prepared:
    """Plan from what every rank has, fetch it, and plan anew without what could not be had; every rank calls it.

    Args:
        rank: this one.
        stage: its pipeline stage.
        shelves: where snapshots are, by source.
        until: the iteration to reach; nothing for the first dense state that the snapshots give.
        transport: between ranks.

    Raises:
        RecoveryError: there is no way back. On every rank alike.
    """
    began = time.perf_counter()
    distinct = {id(shelf): shelf for shelf in shelves.values()}
    holdings = tuple(holding for shelf in distinct.values() for holding in shelf.holdings())
    reports = _tell_all(Report(rank, stage, holdings))
    while True:
        plan = plan_recovery(reports, until)
        fetched = fetch(
            rank, plan, lambda source, owner, iteration: shelves[source].open(source, owner, iteration), transport
        )
        failed = {one for its in _tell_all([f for f in fetched.values() if isinstance(f, Fetch)]) for one in its}
        if not failed:
            snapshots = {iteration: one for iteration, one in fetched.items() if isinstance(one, Snapshot)}
            return Prepared(plan, snapshots, time.perf_counter() - began)
        if rank == 0:
            print(f"moevement: {len(failed)} snapshots could not be had where they were said to be; planning again")
        reports = [_without(report, failed) for report in reports]


def carry_out(parts: Parts, prepared: Prepared) -> Recovery:
    """Replay what was prepared and compare; every rank calls it, inside Megatron's training loop.

    Raises:
        RecoveryError: what came back is not what was lost (on every rank alike), or a snapshot is of another model.
    """
    began = time.perf_counter()
    plan = prepared.plan
    trainer = MegatronTrainer(parts.job, parts.views, _shared_from(parts, plan))
    check = StateCheck({o.name: s for o, s in parts.views.states.items()}, parts.checkpointer.whole_now)
    replayed: list[int] = []

    def tell(iteration: int, frozen: int) -> None:
        replayed.append(iteration)
        if parts.rank == 0:
            operators = len(parts.table)
            active = f"{operators - frozen} of {operators} operators of the first stage active"
            print(f"moevement: replaying iteration {iteration} of {plan.until}, {active}", flush=True)

    with trainer.replaying():
        replay(plan, parts.stage, parts.table.names, prepared.snapshots, trainer, check, tell)
    recovery = Recovery(
        plan.first, plan.until, len(replayed), check.verified_until, check.losses_until,
        {source.name.lower(): count for source, count in plan.sources().items()},
        prepared.fetch_s, time.perf_counter() - began,
    )  # fmt: skip
    return _agreed(recovery, check.differences, trainer.replica_digests())


def _without(report: Report, failed: set[Fetch]) -> Report:
    gone = {(one.holder, one.source, one.owner, one.iteration) for one in failed}
    kept = [h for h in report.holdings if (report.rank, h.source, h.owner, h.iteration) not in gone]
    return replace(report, holdings=tuple(kept))


def _shared_from(parts: Parts, plan: RecoveryPlan) -> int | None:
    """The first iteration in which any copy of a tied embedding is active; None without copies on several stages."""
    from megatron.training import get_args

    if get_args().untie_embeddings_and_output_weights:
        return None
    index = parts.table.index_of.get(EMBEDDING)
    mine = None if index is None else int(plan.runs[parts.stage].full_at[index]) + 1
    return min((active_from for active_from in _tell_all(mine) if active_from is not None), default=None)


def _agreed(recovery: Recovery, differences: list[str], replicas: list[tuple[tuple[int, ...], str]]) -> Recovery:
    """The recovery as all ranks together have it.

    Each rank has compared the part of the state that it saves; ``replicas`` say whether what they brought to each other
    is the same on all.

    Raises:
        RecoveryError: any of them found a difference.
    """
    everyones = _tell_all((recovery, differences, replicas))
    found = [f"rank {rank}: {what}" for rank, (_, its, _) in enumerate(everyones) for what in its]
    found += _unequal_replicas([its for _, _, its in everyones])
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise RecoveryError(
            f"the replayed state is not the one that was lost: {'; '.join(found[:5])}{more}. Nothing of it may be "
            "used: start again from a dense checkpoint or an older window"
        )
    verified = min(one.verified_until for one, *_ in everyones)
    losses = max(one.losses_until for one, *_ in everyones)
    return replace(
        recovery,
        verified_until=None if verified == NONE else verified,
        losses_until=None if losses == NONE else losses,
        fetch_s=max(one.fetch_s for one, *_ in everyones),
        replay_s=max(one.replay_s for one, *_ in everyones),
    )


def _unequal_replicas(everyones: list[list[tuple[tuple[int, ...], str]]]) -> list[str]:
    digests: dict[tuple[int, ...], set[str]] = {}
    for its in everyones:
        for ranks, digest in its:
            digests.setdefault(ranks, set()).add(digest)
    return [
        f"compute weights of ranks {', '.join(map(str, ranks))}, which have the same ones"
        for ranks, found in digests.items()
        if len(found) > 1
    ]


def _tell_all(mine: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told
