"""A prepared recovery is carried out: stages that lost their state replay, the others feed them, all of it is verified.

Every rank calls :func:`carry_out` at the same point; what any of them finds wrong, all of them raise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist

from moevement_core import log
from moevement_core.arithmetic import arithmetic
from moevement_core.errors import RecoveryError
from moevement_core.injection import Phase
from moevement_core.operators import EMBEDDING
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.feed import Alone
from moevement_core.recovery.outcome import Recovery
from moevement_core.recovery.places import Source
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.replay import replay
from moevement_core.restart import injection
from moevement_core.restart.generation import working
from moevement_core.session.binding import Replicas
from moevement_core.session.exchange import all_gather_objects
from moevement_core.session.feeders import start_feeders
from moevement_core.session.parts import Parts
from moevement_core.session.prepare import Prepared
from moevement_core.session.replicas import unequal_replicas
from moevement_core.session.twins import LIVE
from moevement_core.snapshot.agreement import NONE


class TakeAgain(Protocol):
    """:meth:`moevement_core.session.saving.Saving.take_again`."""

    def __call__(self, iteration: int, record: Mapping[str, Any], *, has_gradients: bool) -> None:
        """On every rank, when the state of ``iteration`` is live."""


def carry_out(
    parts: Parts,
    prepared: Prepared,
    lost: LostTokens,
    take_again: TakeAgain | None,
) -> tuple[Recovery, Mapping[str, Any]]:
    """Replay what was prepared and compare; every rank calls it, inside Megatron's training loop.

    Stages that keep their state feed those that replay, and wait.

    Args:
        parts: of this rank.
        prepared: by every rank.
        lost: tokens of this stage whose updates are not in what is restored.
        take_again: called, on every rank, with each iteration but the last that was run again and its record, where
            what was saved of it is of no use any more; None: it is.

    Returns:
        What was done, and the record of the last iteration that was run again; empty if none was.

    Raises:
        RecoveryError: what was recovered is not what was lost (on every rank alike), or a snapshot is of another model.
    """
    began, began_cpu = time.perf_counter(), time.process_time()
    plan = prepared.mine
    everywhere = any(len(plan.ranks) == parts.topology.world for plan in prepared.plans)
    shared_from = _shared_from(parts, plan)
    check = StateCheck(parts.states, parts.checkpointer.capturer.whole_now, enabled=prepared.is_comparable)
    replayed: list[int] = []
    redone: list[int] = []
    came_of: Mapping[str, Any] = {}
    gradients_stay = True

    def tell(iteration: int, frozen: int) -> None:
        injection.at(Phase.REPLAY, iteration)
        replayed.append(iteration)
        if plan is not None and parts.topology.speaks_for_stage and parts.topology.stage == min(plan.runs):
            operators = len(parts.topology.table)
            active = f"{operators - frozen} of {operators} operators of stage {parts.topology.stage} active"
            log.info(f"replaying iteration {iteration} of {plan.until}, {active}")

    def redoes(iteration: int) -> None:
        injection.at(Phase.REDO, iteration)
        redone.append(iteration)

    def keep(iteration: int, record: Mapping[str, Any]) -> None:
        """Take the snapshots again that died with a rank, and those of windows that were under way."""
        checkpointer = parts.checkpointer
        assert plan is not None
        if take_again is not None and iteration in plan.iterations:
            is_left_out = iteration in parts.binding.iterations_left_out()
            if not is_left_out and "step" not in record:
                raise NotImplementedError(f"{type(parts.binding).__name__}: its trainer has no record() of a step")
            take_again(iteration, {} if is_left_out else record, has_gradients=gradients_stay)
        elif iteration in checkpointer.own.snapshots() or prepared.other_arithmetic:
            return
        elif iteration in prepared.snapshots:
            checkpointer.adopt(prepared.snapshots[iteration])
        elif record.get("step") and checkpointer.takes(iteration):
            if iteration > plan.dense_at and gradients_stay:  # before, some operators had no gradients
                checkpointer.log_gradients(iteration, is_replayed=True)
            checkpointer.take(iteration, {"boundary": parts.binding.boundary_copy(), "iteration": record})
            checkpointer.wait()

    if plan is not None and not prepared.other_arithmetic:
        checkpointer = parts.checkpointer
        run = plan.runs[parts.topology.stage]
        for iteration in sorted(prepared.snapshots):
            if iteration >= run.last + (plan.redone_until is not None or run.is_stale):
                continue
            if prepared.snapshots[iteration].header.schedule == LIVE:
                continue
            # A window of another strategy, from disk, does not fit into the few buffers of dense snapshots.
            if checkpointer.takes(iteration) or not checkpointer.history.oldest.is_dense:
                checkpointer.adopt(prepared.snapshots[iteration])
    feeders = [] if everywhere else start_feeders(parts, prepared)
    if plan is not None:
        alone = (
            None
            if everywhere or not plan.iterations
            else Alone(parts.topology.neighbours, frozenset(plan.runs), parts.topology.channels.feeds)
        )
        with parts.binding.replaying(shared_from, alone) as trainer, working():
            gradients_stay = trainer.gradients_stay
            came_of = replay(
                plan, parts.topology.stage, parts.topology.table.names, prepared.snapshots, trainer, check, tell,
                prepared.outcomes, keep, redoes,
            )  # fmt: skip
        is_updated = plan.until not in parts.binding.iterations_left_out()
        if plan.until > max(plan.dense_at, plan.begins) and is_updated and gradients_stay:
            parts.checkpointer.log_gradients(plan.until, is_replayed=True)
    elif any(parts.topology.stage in plan.runs for plan in prepared.plans):
        parts.binding.complete()
    for feeder in feeders:
        feeder.finish()
    first, until = min(one.first for one in prepared.plans), max(one.until for one in prepared.plans)
    known_until = check.known_until if plan is not None else until
    recovery = Recovery(
        first, until, len(replayed), known_until, known_until, len(check.recomputed), len(check.restored),
        check.losses_until, len(check.sends),
        _sum_sources(prepared.plans), {str(parts.topology.stage): len(replayed)},
        len(redone), lost.by_expert, lost.proportion,
        sorted(rank for plan in prepared.plans for rank in plan.ranks),
        sum(feeder.fed_bytes for feeder in feeders),
        prepared.fetch_s, time.perf_counter() - began, time.process_time() - began_cpu,
    )  # fmt: skip
    mine = _Mine(
        recovery, lost, check.differences, check.differ_as_loaded, parts.binding.replicas(), arithmetic()
    )  # fmt: skip
    return _agreed(mine, prepared.other_arithmetic), came_of


def _sum_sources(plans: Sequence[RecoveryPlan]) -> dict[str, int]:
    return {source.name.lower(): sum(plan.sources()[source] for plan in plans) for source in Source}


def _shared_from(parts: Parts, plan: RecoveryPlan | None) -> int | None:
    """The first iteration in which any copy of an embedding is active; None without copies on several stages."""
    if not parts.topology.pipeline.tied:
        return None
    index = parts.topology.table.index_of.get(EMBEDDING)
    mine = None if index is None or plan is None else int(plan.runs[parts.topology.stage].full_at[index]) + 1
    return min(
        (active_from for active_from in all_gather_objects(mine, int | None) if active_from is not None), default=None
    )


@dataclass(frozen=True)
class _Mine:
    """What a rank tells the others of its part."""

    recovery: Recovery
    lost: LostTokens
    differences: list[str]
    """From the state that was lost."""
    differ_as_loaded: bool
    """Whether one of them is of what was only loaded."""
    replicas: list[Replicas]
    """Whether what ranks bring to each other is the same on all, on those too that kept their state."""
    arithmetic: str


def _agreed(mine: _Mine, other_arithmetic: str) -> Recovery:
    """The recovery as all ranks together have it.

    Each rank that replayed has compared the part of the state that it saves. Where ranks, or a window from disk, are of
    different processors, what was run again may have other last bits than what was lost: that is said, and is no error.

    Raises:
        RecoveryError: any of them found a difference that nothing explains.
    """
    everyones = all_gather_objects(mine, _Mine)
    found = [f"rank {rank}: {what}" for rank, its in enumerate(everyones) for what in its.differences]
    unequal = unequal_replicas([its.replicas for its in everyones])
    kinds = sorted({its.arithmetic for its in everyones})
    if len(kinds) > 1 and not other_arithmetic:
        other_arithmetic = f"ranks are of different kinds: {' and '.join(kinds)}"
    is_explained = other_arithmetic and not any(its.differ_as_loaded for its in everyones)
    if found and is_explained and not unequal:
        if dist.get_rank() == 0:
            log.warning(
                f"{other_arithmetic}: what was replayed does not have the bits that were lost ({_some(found)}). "
                "Training goes on from it, as from a checkpoint that is loaded elsewhere"
            )
    elif found or unequal:
        raise RecoveryError(
            f"the replayed state is not the one that was lost: {_some(found + unequal)}. Nothing of it may be used: "
            "start again from a dense checkpoint or an older window"
        )
    recoveries, lost = [its.recovery for its in everyones], mine.lost
    known = min(NONE if one.restored_until is None else one.restored_until for one in recoveries)
    recomputed = sum(one.recomputed for one in recoveries)
    losses = max(one.losses_until for one in recoveries)
    by_stage: dict[str, int] = {}
    for its in everyones:
        lost |= its.lost  # the same on all ranks of a stage
        for stage, count in its.recovery.replayed_by_stage.items():
            by_stage[stage] = max(count, by_stage.get(stage, 0))
    return replace(
        mine.recovery,
        replayed=max(one.replayed for one in recoveries),
        redone=max(one.redone for one in recoveries),
        replayed_by_stage=dict(sorted(by_stage.items(), key=lambda item: int(item[0]))),
        lost_tokens=lost.by_expert,
        proportion_lost=lost.proportion,
        fed_bytes=sum(one.fed_bytes for one in recoveries),
        verified_until=None if known == NONE or not recomputed else known,
        restored_until=None if known == NONE else known,
        recomputed=recomputed,
        restored=sum(one.restored for one in recoveries),
        losses_until=None if losses == NONE else losses,
        sends=max(one.sends for one in recoveries),
        fetch_s=max(one.fetch_s for one in recoveries),
        replay_s=max(one.replay_s for one in recoveries),
        replay_cpu_s=sum(one.replay_cpu_s for one in recoveries),
    )


def _some(found: Sequence[str]) -> str:
    return "; ".join(found[:5]) + (f" (and {len(found) - 5} more)" if len(found) > 5 else "")
