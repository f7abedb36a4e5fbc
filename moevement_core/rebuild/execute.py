"""Execution of a prepared recovery: stages without state replay, other stages feed them, and all ranks verify.

Every rank calls :func:`execute` at the same point. If one rank finds an error, all ranks raise it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from moevement_core.audit.replicas import compact
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.operators import EMBEDDING
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.rebuild.feeders import start_feeders
from moevement_core.rebuild.prepare import Prepared
from moevement_core.rebuild.reexecution import Recapture, Reexecution
from moevement_core.rebuild.verdict import RankVerdict, agree
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.holdings import Source
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.run.outcome import Recovery
from moevement_core.topology.parts import RankParts
from moevement_core.trainer.capabilities import SupportsGather, replica_digests


def execute(
    parts: RankParts,
    prepared: Prepared,
    lost: LostTokens,
    recapture: Recapture | None,
) -> tuple[Recovery, Mapping[str, Any]]:
    """Execute a prepared recovery, and compare the result with digests. Every rank calls it in the training loop.

    Stages that keep their state feed those that replay, and wait.

    Args:
        parts: objects of this rank that a recovery uses.
        prepared: prepared recovery, with the snapshots of this rank.
        lost: tokens of this stage whose updates are missing in the restored state.
        recapture: capture of the snapshots of re-executed iterations; None if their earlier snapshots stay valid.

    Returns:
        Summary over all ranks, and the record of the last iteration that this rank re-executed. The record is empty if
        this rank re-executed none.

    Raises:
        RecoveryError: the recovered state differs from the lost one without a known reason (every rank raises this), or
            a snapshot belongs to another model.
    """
    began, began_cpu = time.perf_counter(), time.process_time()
    plan = prepared.own_plan
    with_all = any(len(each_plan.ranks) == parts.topology.world for each_plan in prepared.plans)
    shared_from = _shared_from(parts, plan)
    check = StateCheck(parts.states, parts.checkpointer.capturer.whole_now, enabled=prepared.is_comparable)
    reexecution = Reexecution(parts, prepared, plan, recapture) if plan is not None else None
    if reexecution is not None:
        reexecution.adopt()
    feeders = [] if with_all else start_feeders(parts, prepared)
    outcome: Mapping[str, Any] = {}
    if reexecution is not None:
        outcome = reexecution.run(check, shared_from, with_all=with_all)
    elif isinstance(parts.binding, SupportsGather) and any(
        parts.topology.stage in each_plan.runs for each_plan in prepared.plans
    ):
        parts.binding.gather_replicas()
    for feeder in feeders:
        feeder.finish()
    first, until = (
        min(each_plan.first for each_plan in prepared.plans),
        max(each_plan.until for each_plan in prepared.plans),
    )
    known_until = check.known_until if reexecution is not None else until
    replayed, redone = (reexecution.replayed, reexecution.redone) if reexecution is not None else (0, 0)
    recovery = Recovery(
        first, until, replayed=replayed, verified_until=known_until, restored_until=known_until,
        recomputed=len(check.recomputed), restored=len(check.restored), largest_difference=check.largest_difference,
        losses_until=check.losses_until, sends=len(check.sends), sources=_sum_sources(prepared.plans),
        replayed_by_stage={str(parts.topology.stage): replayed}, redone=redone, lost_tokens=lost.by_expert,
        proportion_lost=lost.proportion, proportion_lost_so_far=lost.proportion_so_far,
        ranks=sorted(rank for each_plan in prepared.plans for rank in each_plan.ranks),
        fed_bytes=sum(feeder.fed_bytes for feeder in feeders), fetch_s=prepared.fetch_s,
        replay_s=time.perf_counter() - began, replay_cpu_s=time.process_time() - began_cpu,
    )  # fmt: skip
    part = RankVerdict(
        recovery,
        lost,
        differences=check.differences,
        differ_as_loaded=check.differ_as_loaded,
        replicas=compact(replica_digests(parts.binding)),
    )
    return agree(part, prepared.other_arithmetic, prepared.other_data), outcome


def _sum_sources(plans: Sequence[RecoveryPlan]) -> dict[str, int]:
    return {source.name.lower(): sum(plan.sources()[source] for plan in plans) for source in Source}


def _shared_from(parts: RankParts, plan: RecoveryPlan | None) -> int | None:
    """Return the first iteration of the replay in which a tied embedding is active on some stage.

    From this iteration on, the replay sums the gradients of all copies of the embedding. Before it, every
    replaying copy is frozen, so that only its compute weights are loaded. Every rank calls the function.

    Returns:
        None if the embedding is not tied, or if no stage that has a copy of it replays.
    """
    if not parts.topology.pipeline.tied:
        return None
    index = parts.topology.table.index_of.get(EMBEDDING)
    local = None if index is None or plan is None else int(plan.runs[parts.topology.stage].full_at[index]) + 1
    return min(
        (active_from for active_from in all_gather_objects(local, int | None) if active_from is not None), default=None
    )
