"""Transfer of state between the ranks of an elastic job that has changed its size, and the event about the new size."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron.moevement.elastic.pieces import RankPosition, state_pieces
from megatron.moevement.elastic.resized import Resized
from megatron.moevement.elastic.slots import slots
from megatron.moevement.elastic.survivor_state import SurvivorState
from megatron.moevement.elastic.transfer import bring_pieces
from megatron.moevement.optimizer import weights
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import members
from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import Exchanged
from moevement_core.operators import expert_name
from moevement_core.restart.generation import generation
from moevement_core.run.events import Resized as ResizedEvent


@torch.no_grad()
def bring_live_state(
    live: Live, stand: RankPosition, iteration: int, survivor: SurvivorState | None, *, is_verified: bool
) -> Exchanged:
    """Fill a newly built model and its optimizer with the state that survivors bring. Collective.

    Args:
        live: Megatron's objects.
        stand: position of this rank in the resized job.
        iteration: newest iteration that any rank has committed. Ranks transfer the state after this iteration.
        survivor: state that this rank brings; None if the rank brings no state.
        is_verified: True to compare digests of all replicas, and of each operator before and after the transfer.

    Returns:
        The number of moved bytes, and the compared digests.

    Raises:
        StateMissing: no rank holds some part of the state; every rank raises this error.
        RecoveryError: replicas differ, or a digest differs after the transfer; every rank raises this error.
    """
    from megatron.core.utils import unwrap_model

    wanted = state_pieces(list(unwrap_model(live.model or [])), live.optimizer, stand)
    exchanged = bring_pieces(survivor.live(iteration) if survivor is not None else (), wanted, is_verified=is_verified)
    _make_weights(live)
    return exchanged


@torch.no_grad()
def equalize_replicas(live: Live, stand: RankPosition) -> None:
    """Copy the state of each expert's first replica to the other replicas of the expert. Collective.

    Every rank calls it when the job starts, because Megatron may build or load the replicas of an expert with different
    state.
    """
    from megatron.core.utils import unwrap_model

    expert_slots = slots()
    assert expert_slots is not None
    pieces = state_pieces(list(unwrap_model(live.model or [])), live.optimizer, stand)
    first = {
        expert_name(layer, expert)
        for layer, table in expert_slots.tables.items()
        for slot, expert in enumerate(table[stand.expert])
        if expert_slots.is_first(layer, stand.expert, slot)
    }
    experts = {expert_name(layer, expert) for layer in expert_slots.tables for expert in range(expert_slots.experts)}
    held = [piece for piece in pieces if piece.operator not in experts or piece.operator in first]
    bring_pieces(held, pieces, is_verified=True)
    _make_weights(live)


def _make_weights(live: Live) -> None:
    for member in members(live.optimizer):
        weights.copy_masters(member)
    weights.gather(live.model or [], force=True)


def report_resized(job: Job, resized: Resized) -> None:
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
        iteration=resized.iteration,
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
    job.event(event)
