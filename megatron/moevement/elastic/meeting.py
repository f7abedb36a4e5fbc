"""How ranks of an elastic job find out what is left, after every failure and when the job grows.

They go on from what they have in memory: replicas and shards of the state after the newest iteration that anybody has
committed. A process may get another rank, so nothing of the old model is kept but its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.moevement.elastic.offer import Offer
from megatron.moevement.elastic.pieces import Stand, state_pieces
from megatron.moevement.elastic.slots import Loads, slots
from megatron.moevement.runtime.job import Job, Process
from moevement_core.elastic.exchange import Piece
from moevement_core.session.commit import Mark
from moevement_core.session.exchange import all_gather_objects


@dataclass(frozen=True)
class _Standing:
    """What a rank tells all others of what it has."""

    lineage: str
    committed: int
    has_begun_next: bool
    may_follow: bool
    stand: Stand
    outcome: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)


class Held(NamedTuple):
    """What a rank brings, of experts in slots."""

    stage: int = -1
    experts: Mapping[int, Sequence[int]] = {}
    """By layer, those in its slots."""
    loads: Loads = {}


@dataclass(frozen=True)
class Meeting:
    """What ranks have agreed on, the same on all of them."""

    lineage: str
    iteration: int
    """That all go on from."""
    is_between: bool
    """Whether what is due after it (evaluation, dense save) may not have been done."""
    world_before: int
    boundaries: Mapping[Stand, Mapping[str, Any]]
    """What stands beside the optimizer's state, by where a rank stood that has it."""
    books: float
    held: Sequence[Held]
    """Of every rank, what it brings."""

    def boundary_for(self, stand: Stand) -> Mapping[str, Any] | None:
        """What a rank goes on with; nothing if nobody of its stage is left.

        Data-parallel replicas draw the same random numbers, so all of them go on with those of one.
        """
        of_stage = [one for one in self.boundaries if one.stage == stand.stage]
        if not of_stage:
            return None
        return self.boundaries[
            min(of_stage, key=lambda one: (one.tensor != stand.tensor, one.expert != stand.expert, one.rank))
        ]


def meet(process: Process) -> Meeting | None:
    """Tell each other what is left, bring every survivor to the newest iteration, and keep its state as an offer.

    Every rank calls it, when process groups are usable. Nothing is returned, to anybody, where no state is left.
    """
    mine = _standing(process)
    everyones: list[_Standing | None] = all_gather_objects(mine)
    known = [one for one in everyones if one is not None]
    if not known:
        return None
    lineage = max((one.lineage for one in known), key=_number_of_start)
    known = [one for one in known if one.lineage == lineage]
    newest = max(one.committed for one in known)
    holders = [one for one in known if one.committed == newest]
    has = mine is not None and mine.lineage == lineage
    if has and mine is not None and mine.committed == newest - 1 and mine.may_follow:
        _follow(process.job, holders, newest)
    elif not (has and mine is not None and mine.committed == newest):
        process.offer, has = None, False
    if has and process.offer is None:
        process.offer = _offer(process)
    is_between = not (all(one.has_begun_next for one in holders) and any(one.stand.is_last for one in holders))
    return _agree(process.offer, lineage, newest, is_between, holders[0].stand.world)


def _agree(offer: Offer | None, lineage: str, iteration: int, is_between: bool, world_before: int) -> Meeting:
    stands = all_gather_objects(offer.stand if offer is not None else None)
    speakers = {(one.stage, one.tensor, one.expert): one for one in reversed(stands) if one is not None}
    mine = None
    if offer is not None and offer.stand in speakers.values():
        mine = offer.mark.boundary if is_between or offer.mark.resumed is None else offer.mark.resumed
    held = Held() if offer is None else Held(offer.stand.stage, offer.experts, offer.loads)
    given = all_gather_objects((mine, offer.books if offer is not None else 0.0, held))
    boundaries = {stand: its for stand, (its, _, _) in zip(stands, given, strict=True) if its is not None}
    return Meeting(
        lineage, iteration, is_between, world_before, boundaries, max(books for _, books, _ in given),
        [its for _, _, its in given],
    )  # fmt: skip


def _number_of_start(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def _standing(process: Process) -> _Standing | None:
    if (offer := process.offer) is not None:
        mark = offer.mark
        return _Standing(
            offer.lineage, mark.iteration, mark.resumed is not None, False, offer.stand, mark.outcome,
            _common(mark.boundary),
        )  # fmt: skip
    job = process.job
    commit = job.session.commit if job.session is not None and job.has_begun else None
    if commit is None or commit.torn or (mark_ := commit.mark) is None:
        return None
    assert job.stand is not None
    return _Standing(
        process.lineage, mark_.iteration, mark_.resumed is not None, True, job.stand, mark_.outcome,
        _common(mark_.boundary),
    )  # fmt: skip


def _common(boundary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: boundary[name] for name in ("progress", "loss_scalers")}


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
    from megatron.core.utils import unwrap_model
    from megatron.training import get_args

    job = process.job
    assert job.session is not None
    assert job.session.commit.mark is not None
    assert job.stand is not None
    its = slots()
    pieces = state_pieces(list(unwrap_model(job.live.model or [])), job.live.optimizer, job.stand)
    return Offer(
        process.lineage,
        job.session.commit.mark,
        # The next model needs the device, and has other shards.
        [Piece(one.operator, one.name, one.begin, one.tensor.cpu()) for one in pieces],
        job.stand,
        float(get_args().num_floating_point_operations_so_far),
        {} if its is None else {layer: table[job.stand.expert] for layer, table in its.tables.items()},
        {} if job.loads is None else job.loads.now(),
    )
