"""An elastic job's state to the ranks of now, and what an operator sees of it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron.moevement.elastic.offer import Offer
from megatron.moevement.elastic.pieces import Stand, state_pieces
from megatron.moevement.elastic.resized import Resized
from megatron.moevement.elastic.slots import slots
from megatron.moevement.elastic.transfer import bring_pieces
from megatron.moevement.optimizer import weights
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import members
from moevement_core import log
from moevement_core.elastic.exchange import Exchanged
from moevement_core.events import Resized as ResizedEvent
from moevement_core.operators import expert_name
from moevement_core.restart.generation import generation
from moevement_core.session.exchange import all_gather_objects


@torch.no_grad()
def bring_live_state(live: Live, stand: Stand, iteration: int, offer: Offer | None, *, is_verified: bool) -> Exchanged:
    """Fill the optimizer's state of a model that was just built, and its weights; every rank calls it.

    Args:
        live: Megatron's objects.
        stand: where this rank stands in the job of now.
        iteration: whose state; the newest that anybody has committed.
        offer: what this rank has; None: nothing.
        is_verified: see :func:`~moevement_core.elastic.exchange.exchange`.

    Raises:
        StateMissing: neither replicas nor shards of a part of it are left. On every rank alike.
        RecoveryError: replicas differ, or the state is another than it was. On every rank alike.
    """
    from megatron.core.utils import unwrap_model

    wanted = state_pieces(list(unwrap_model(live.model or [])), live.optimizer, stand)
    exchanged = bring_pieces(offer.live(iteration) if offer is not None else (), wanted, is_verified=is_verified)
    _make_weights(live)
    return exchanged


@torch.no_grad()
def equalize_replicas(live: Live, stand: Stand) -> None:
    """Send the state of the first replica of each expert, as it was built or loaded, to all replicas at a start of the
    job.

    Every rank calls it.
    """
    from megatron.core.utils import unwrap_model

    its = slots()
    assert its is not None
    pieces = state_pieces(list(unwrap_model(live.model or [])), live.optimizer, stand)
    first = {
        expert_name(layer, expert)
        for layer, table in its.tables.items()
        for slot, expert in enumerate(table[stand.expert])
        if its.is_first(layer, stand.expert, slot)
    }
    experts = {expert_name(layer, expert) for layer in its.tables for expert in range(its.experts)}
    held = [one for one in pieces if one.operator not in experts or one.operator in first]
    bring_pieces(held, pieces, is_verified=True)
    _make_weights(live)


def _make_weights(live: Live) -> None:
    for member in members(live.optimizer):
        weights.copy_masters(member)
    weights.gather(live.model or [], force=True)


def report_resized(job: Job, resized: Resized) -> None:
    """Tell the operator; every rank calls it."""
    now = generation()
    assert now is not None
    roster = now.roster
    moments = all_gather_objects(
        (now.interrupted_at, resized.usable_at, resized.brought_at, time.time()),
        tuple[float | None, float, float, float],
    )
    interrupted_at, usable_at, brought_at, resumed_at = zip(*moments, strict=True)
    deaths = (*roster.earlier, *roster.deaths)  # an attempt to go on may have been interrupted itself
    began_at = min([*(death.at for death in deaths), *filter(None, interrupted_at)], default=min(usable_at))
    gone = ", ".join(f"rank {one.rank} (pid {one.pid}) {one.how}" for one in deaths if one.rank is not None)
    event = ResizedEvent(
        iteration=resized.iteration,
        world_before=resized.world_before,
        world_size=dist.get_world_size(),
        lost=gone,
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
