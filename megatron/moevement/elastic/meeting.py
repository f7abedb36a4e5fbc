"""Meeting of the ranks of an elastic job, in which they report what state the memory of each rank still holds.

Ranks meet after a failure, before the job grows, and before experts move between ranks. A rank's memory may hold a
replica or a shard of the state after the newest committed iteration, and snapshots. The process may get another rank,
so it copies this state to host memory and drops the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron.moevement.elastic.formation import FormationSnapshots
from megatron.moevement.elastic.iteration_outcome import IterationOutcome, newest_outcome
from megatron.moevement.elastic.pieces import RankPosition, state_pieces
from megatron.moevement.elastic.slots import Loads, slots
from megatron.moevement.elastic.survivor_state import SurvivorState
from megatron.moevement.runtime.job import Job, Process
from moevement_core.comms.codec import Plain
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import Piece
from moevement_core.recovery.sources import MemorySource
from moevement_core.trainer.commit import Mark


@dataclass(frozen=True)
class _Standing:
    """Report that a rank sends to all other ranks: its newest committed iteration and its parallel position."""

    lineage: str
    committed: int
    has_begun_next: bool
    may_follow: bool
    stand: RankPosition
    outcome: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OfferedState:
    """Description of the state that a rank brings into the resized job; the state itself is transferred later."""

    stand: RankPosition | None = None
    """Position of the rank before the meeting; None if the rank does not hold the newest iteration."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Experts in the rank's slots, by layer."""
    loads: Loads = field(default_factory=dict)


@dataclass(frozen=True)
class Meeting:
    """Result of :func:`meet`, equal on all ranks."""

    lineage: str
    is_between: bool
    """True if an evaluation or dense save that was due after the newest iteration may not have happened."""
    world_before: int
    newest: int
    """Newest iteration that any rank has committed; -1 if only snapshots hold state."""
    run_totals: float
    """Floating-point operations that the job has executed so far."""
    held: Sequence[OfferedState]
    """Description of the state that each rank brings, by rank."""
    newest_outcome: IterationOutcome | None = None
    """Outcome of the newest iteration, which ``metrics.jsonl`` may lack; None if no survivor has it."""


def meet(process: Process) -> Meeting | None:
    """Exchange reports about the state that ranks still have, and bring survivors to the newest iteration.

    Collective: every rank calls it as soon as process groups are usable. Afterwards ``process.survivor`` has the state
    of this rank, if the rank is a survivor.

    Returns:
        The result of the meeting; None on every rank if no rank has state left.
    """
    own = _standing(process)
    known: list[_Standing] = [report for report in all_gather_objects(own, _Standing | None) if report is not None]
    if not known:
        return None
    lineage = max((report.lineage for report in known), key=_number_of_start)
    if own is None or own.lineage != lineage:
        own, process.survivor, process.before = None, None, ()
    known = [report for report in known if report.lineage == lineage]
    newest = max(report.committed for report in known)
    holders = [report for report in known if report.committed == newest]
    if own is not None and own.committed == newest - 1 and own.may_follow:
        _follow(process.job, holders, newest)
    if own is not None and process.survivor is None:
        process.survivor = _survivor_state(process)
    is_between = not (
        all(holder.has_begun_next for holder in holders) and any(holder.stand.is_last for holder in holders)
    )
    return _agree(process.survivor, lineage, newest, is_between)


def _agree(survivor: SurvivorState | None, lineage: str, iteration: int, is_between: bool) -> Meeting:
    """Exchange descriptions of the state that ranks bring. Collective.

    A rank that has not committed ``iteration`` brings nothing. For example, its process was a spare for some time.
    """
    committed = -1 if survivor is None or survivor.mark is None else survivor.mark.iteration
    held = (
        OfferedState()
        if survivor is None or committed < iteration
        else OfferedState(survivor.stand, survivor.experts, survivor.loads)
    )
    kept_snapshots = all_gather_objects(held, OfferedState)
    world = max(brought.stand.world for brought in kept_snapshots if brought.stand is not None)
    run_totals = max(all_gather_objects(survivor.run_totals if survivor is not None else 0.0, float))
    return Meeting(
        lineage,
        is_between,
        world_before=world,
        newest=iteration,
        run_totals=run_totals,
        held=kept_snapshots,
        newest_outcome=newest_outcome(survivor, iteration),
    )


def live_boundary(meeting: Meeting, survivor: SurvivorState | None, stand: RankPosition) -> Mapping[str, Any] | None:
    """Return the boundary record with which this rank continues from the newest iteration. Collective.

    The record has no optimizer state, which :func:`~megatron.moevement.elastic.bring.bring_live_state` transfers.

    Args:
        meeting: result of :func:`meet`.
        survivor: state that this rank brings; None if the rank brings no state.
        stand: position of this rank in the resized job.

    Returns:
        The boundary record; None if no rank of the same stage has one.
    """
    own: dict[RankPosition, Mapping[str, Any]] = {}
    if survivor is not None and (mark := survivor.mark) is not None and mark.iteration == meeting.newest:
        is_complete = not meeting.is_between and mark.resumed is not None
        own = {survivor.stand: mark.resumed if is_complete and mark.resumed is not None else mark.boundary}
    return nearest_of_stage(own, stand)


def nearest_of_stage(
    offered: Mapping[RankPosition, Mapping[str, Any]], stand: RankPosition
) -> Mapping[str, Any] | None:
    """Choose a boundary or snapshot record for this rank from those that all ranks offer. Collective.

    The record is from this rank's stage, and from the same tensor- and expert-parallel rank if there is one.
    Data-parallel replicas draw the same random numbers, so all replicas can continue with the record of one replica.

    Args:
        offered: records that this rank offers, by the position of the rank that made each record.
        stand: position of this rank in the resized job.

    Returns:
        The chosen record; None if no rank offers a record of this stage.
    """
    speakers: dict[tuple[int, int, int], int] = {}
    for rank, stands in enumerate(all_gather_objects(list(offered), list[RankPosition])):
        for old in stands:
            speakers.setdefault((old.stage, old.tensor, old.expert), rank)
    rank = dist.get_rank()
    own = {old: state for old, state in offered.items() if speakers[old.stage, old.tensor, old.expert] == rank}
    gathered = all_gather_objects({old: Plain(state) for old, state in own.items()}, dict[RankPosition, Plain])
    candidates = {old: plain.value for sent in gathered for old, plain in sent.items() if old.stage == stand.stage}
    if not candidates:
        return None
    return candidates[
        min(candidates, key=lambda old: (old.tensor != stand.tensor, old.expert != stand.expert, old.rank))
    ]


def _number_of_start(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def _standing(process: Process) -> _Standing | None:
    """Return the report of this rank; None if the rank has no state.

    A rank whose optimizer step was interrupted halfway reports no committed iteration, but may still have snapshots.
    """
    if (survivor := process.survivor) is not None:
        return _standing_of(survivor.lineage, survivor.mark, survivor.stand, may_follow=False)
    job = process.job
    commit = job.session.commit if job.session is not None and job.has_begun else None
    if commit is None:
        return None
    assert job.stand is not None
    return _standing_of(process.lineage, None if commit.torn else commit.mark, job.stand, may_follow=True)


def _standing_of(lineage: str, mark: Mark | None, stand: RankPosition, *, may_follow: bool) -> _Standing:
    if mark is None:
        return _Standing(lineage, committed=-1, has_begun_next=False, may_follow=False, stand=stand)
    common = {name: mark.boundary[name] for name in ("progress", "loss_scalers")}
    return _Standing(
        lineage,
        committed=mark.iteration,
        has_begun_next=mark.resumed is not None,
        may_follow=may_follow,
        stand=stand,
        outcome=mark.outcome,
        common=common,
    )


def _follow(job: Job, holders: Sequence[_Standing], newest: int) -> None:
    """Commit iteration ``newest`` on this rank, which had finished the reductions of the step before the failure.

    The rank applies the update with the outcome of a rank that had committed the iteration.
    """
    assert job.session is not None
    assert job.stand is not None
    # Replicas of a stage have the same gradients, and all ranks of a model replica clip by the same norm.
    same = [holder for holder in holders if holder.stand.stage == job.stand.stage]
    peer = (same or list(holders))[0]
    commit = job.session.commit
    if newest in job.binding.iterations_left_out() and commit.mark is not None:  # skipped: no step was made
        commit.mark = Mark(newest, {**commit.mark.boundary, **peer.common}, {})
        return
    commit.follow(newest, peer.outcome, peer.common)


def _survivor_state(process: Process) -> SurvivorState:
    from megatron.training import get_args

    job = process.job
    assert job.session is not None
    assert job.stand is not None
    assert job.formation is not None
    expert_slots = slots()
    mark = None if job.session.commit.torn else job.session.commit.mark
    pieces = [] if mark is None else state_pieces(_chunks(job), job.live.optimizer, job.stand)
    memory = MemorySource(job.session.saving.checkpointer)
    snapshots = [memory.open(holding.source, holding.owner, holding.iteration) for holding in memory.holdings()]
    return SurvivorState(
        lineage=process.lineage,
        mark=mark,
        # Pieces move to host memory, because the next model needs the device memory.
        pieces=[Piece(piece.operator, piece.name, piece.begin, piece.tensor.cpu()) for piece in pieces],
        stand=job.stand,
        run_totals=float(get_args().num_floating_point_operations_so_far),
        experts={}
        if expert_slots is None
        else {layer: table[job.stand.expert] for layer, table in expert_slots.tables.items()},
        loads={} if job.loads is None else job.loads.now(),
        losses=None if mark is None else job.ledger.sums_of(mark.iteration),
        kept_snapshots=[
            FormationSnapshots.in_memory(
                [snapshot for snapshot in snapshots if snapshot is not None], job.formation, job.stand.rank
            ),
            *(() if job.session.saving.has_persisted else process.before),
        ],
    )


def _chunks(job: Job) -> list[Any]:
    from megatron.core.utils import unwrap_model

    return list(unwrap_model(job.live.model or []))
