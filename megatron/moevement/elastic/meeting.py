"""Exchange between the ranks of an elastic job on which state is left: after a failure, before growing, and at a
rebalance.

They go on from what they have in memory: replicas and shards of the state after the newest iteration that any rank has
committed, and snapshots. A process may get another rank, so of the old model only the state is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron.moevement.elastic.held import Held
from megatron.moevement.elastic.line import Line, line_of
from megatron.moevement.elastic.offer import Offer
from megatron.moevement.elastic.pieces import Stand, state_pieces
from megatron.moevement.elastic.slots import Loads, slots
from megatron.moevement.runtime.job import Job, Process
from moevement_core.elastic.exchange import Piece
from moevement_core.session.codec import Plain
from moevement_core.session.commit import Mark
from moevement_core.session.exchange import all_gather_objects
from moevement_core.session.sources import MemorySource


@dataclass(frozen=True)
class _Standing:
    """Report of a rank to all others on what it has."""

    lineage: str
    committed: int
    has_begun_next: bool
    may_follow: bool
    stand: Stand
    outcome: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Brought:
    """State that a rank brings."""

    stand: Stand | None = None
    """Position that the rank had; None: it is new, or has waited."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Experts in its slots, by layer."""
    loads: Loads = field(default_factory=dict)


@dataclass(frozen=True)
class Meeting:
    """Agreement of the ranks, the same on all of them."""

    lineage: str
    is_between: bool
    """True if an evaluation or dense save after the newest iteration may not have happened."""
    world_before: int
    newest: int
    """The newest iteration that anybody has committed; -1: nobody has state but in snapshots."""
    books: float
    """Floating-point operations so far."""
    held: Sequence[Brought]
    """State that each rank brings."""
    line: Line | None = None
    """Outcome of the newest iteration, for a line of metrics that may not have been written."""


def meet(process: Process) -> Meeting | None:
    """Tell each other what is left, bring every survivor to the newest iteration, and keep its state as an offer.

    Every rank calls it, when process groups are usable. Nothing is returned, to anybody, where no state is left.
    """
    mine = _standing(process)
    known: list[_Standing] = [one for one in all_gather_objects(mine, _Standing | None) if one is not None]
    if not known:
        return None
    lineage = max((one.lineage for one in known), key=_number_of_start)
    if mine is None or mine.lineage != lineage:
        mine, process.offer, process.before = None, None, ()
    known = [one for one in known if one.lineage == lineage]
    newest = max(one.committed for one in known)
    holders = [one for one in known if one.committed == newest]
    if mine is not None and mine.committed == newest - 1 and mine.may_follow:
        _follow(process.job, holders, newest)
    if mine is not None and process.offer is None:
        process.offer = _offer(process)
    is_between = not (all(one.has_begun_next for one in holders) and any(one.stand.is_last for one in holders))
    return _agree(process.offer, lineage, newest, is_between)


def _agree(offer: Offer | None, lineage: str, iteration: int, is_between: bool) -> Meeting:
    """Agree on the state. A rank without state of ``iteration`` (it may have waited as a spare
    since) brings nothing.
    """
    committed = -1 if offer is None or offer.mark is None else offer.mark.iteration
    held = Brought() if offer is None or committed < iteration else Brought(offer.stand, offer.experts, offer.loads)
    helds = all_gather_objects(held, Brought)
    world = max(one.stand.world for one in helds if one.stand is not None)
    books = max(all_gather_objects(offer.books if offer is not None else 0.0, float))
    return Meeting(lineage, is_between, world, iteration, books, helds, line_of(offer, iteration))


def live_boundary(meeting: Meeting, offer: Offer | None, stand: Stand) -> Mapping[str, Any] | None:
    """Return the boundary state with which this rank continues, beside the optimizer's state of the newest iteration;
    None if no rank of its stage has it. Collective.

    Args:
        meeting: of all ranks.
        offer: of this rank.
        stand: where this rank stands in the job of now.
    """
    mine: dict[Stand, Mapping[str, Any]] = {}
    if offer is not None and (mark := offer.mark) is not None and mark.iteration == meeting.newest:
        is_complete = not meeting.is_between and mark.resumed is not None
        mine = {offer.stand: mark.resumed if is_complete and mark.resumed is not None else mark.boundary}
    return nearest_of_stage(mine, stand)


def nearest_of_stage(mine: Mapping[Stand, Mapping[str, Any]], stand: Stand) -> Mapping[str, Any] | None:
    """Return what a rank of the same stage brings, of the same position in it where there is one; None if no rank
    brings any.

    Data-parallel replicas draw the same random numbers, so all of them go on with those of one. Every rank calls it.

    Args:
        mine: what this rank brings, by where a rank stood.
        stand: where this rank stands.
    """
    speakers: dict[tuple[int, int, int], int] = {}
    for rank, its in enumerate(all_gather_objects(list(mine), list[Stand])):
        for one in its:
            speakers.setdefault((one.stage, one.tensor, one.expert), rank)
    own = {one: its for one, its in mine.items() if speakers[one.stage, one.tensor, one.expert] == dist.get_rank()}
    sent = all_gather_objects({one: Plain(its) for one, its in own.items()}, dict[Stand, Plain])
    found = {one: its.value for given in sent for one, its in given.items() if one.stage == stand.stage}
    if not found:
        return None
    return found[min(found, key=lambda one: (one.tensor != stand.tensor, one.expert != stand.expert, one.rank))]


def _number_of_start(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def _standing(process: Process) -> _Standing | None:
    """Nothing on a rank that is new. One whose step was torn has committed nothing, and may have snapshots."""
    if (offer := process.offer) is not None:
        return _standing_of(offer.lineage, offer.mark, offer.stand, may_follow=False)
    job = process.job
    commit = job.session.commit if job.session is not None and job.has_begun else None
    if commit is None:
        return None
    assert job.stand is not None
    return _standing_of(process.lineage, None if commit.torn else commit.mark, job.stand, may_follow=True)


def _standing_of(lineage: str, mark: Mark | None, stand: Stand, *, may_follow: bool) -> _Standing:
    if mark is None:
        return _Standing(lineage, -1, False, False, stand)
    common = {name: mark.boundary[name] for name in ("progress", "loss_scalers")}
    return _Standing(lineage, mark.iteration, mark.resumed is not None, may_follow, stand, mark.outcome, common)


def _follow(job: Job, holders: Sequence[_Standing], newest: int) -> None:
    """Make the update that others have made; every reduction of it was over."""
    assert job.session is not None
    assert job.stand is not None
    # Ranks of one model replica clip by the same norm; replicas of a stage have the same gradients.
    same = [one for one in holders if one.stand.stage == job.stand.stage]
    peer = (same or list(holders))[0]
    commit = job.session.commit
    if newest in job.binding.iterations_left_out() and commit.mark is not None:  # there was no step
        commit.mark = Mark(newest, {**commit.mark.boundary, **peer.common}, {})
        return
    commit.follow(newest, peer.outcome, peer.common)


def _offer(process: Process) -> Offer:
    from megatron.training import get_args

    job = process.job
    assert job.session is not None
    assert job.stand is not None
    assert job.formation is not None
    its = slots()
    mark = None if job.session.commit.torn else job.session.commit.mark
    pieces = [] if mark is None else state_pieces(_chunks(job), job.live.optimizer, job.stand)
    memory = MemorySource(job.session.saving.checkpointer)
    found = [memory.open(one.source, one.owner, one.iteration) for one in memory.holdings()]
    return Offer(
        process.lineage,
        mark,
        # The next model needs the device, and has other shards.
        [Piece(one.operator, one.name, one.begin, one.tensor.cpu()) for one in pieces],
        job.stand,
        float(get_args().num_floating_point_operations_so_far),
        {} if its is None else {layer: table[job.stand.expert] for layer, table in its.tables.items()},
        {} if job.loads is None else job.loads.now(),
        None if mark is None else job.ledger.sums_of(mark.iteration),
        [
            Held.in_memory([one for one in found if one is not None], job.formation, job.stand.rank),
            *(() if job.session.saving.has_persisted else process.before),
        ],
    )


def _chunks(job: Job) -> list[Any]:
    from megatron.core.utils import unwrap_model

    return list(unwrap_model(job.live.model or []))
