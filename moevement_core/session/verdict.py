"""Verdict of all ranks on a recovery: the recovered state is the lost one, or the job ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from moevement_core import log
from moevement_core.errors import RecoveryError
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.recovery.outcome import Recovery
from moevement_core.session.binding import Replicas
from moevement_core.session.exchange import all_gather_objects
from moevement_core.session.replicas import unequal_replicas
from moevement_core.snapshot.agreement import NONE


@dataclass(frozen=True)
class Part:
    """Result of one rank's part of a recovery, as it is sent to the others."""

    recovery: Recovery
    lost: LostTokens
    differences: list[str]
    """Differences from the lost state."""
    differ_as_loaded: bool
    """True if one of the differences is in state that was only loaded."""
    replicas: list[Replicas]
    """Digests of state that ranks bring to each other and that must be the same on all, survivors included."""


def agree(mine: Part, other_arithmetic: str, other_data: Sequence[str] = ()) -> Recovery:
    """Return the recovery as all ranks together have it; every rank calls it.

    Each rank that replayed has compared the part of the state that it saves. Where ``other_arithmetic`` says why last
    bits may be others than those that were lost, a difference is reported and is no error; what was only loaded, and
    replicas, have to be equal all the same.

    Args:
        mine: this rank's part.
        other_arithmetic: as in :class:`~moevement_core.session.prepare.Prepared`, like ``other_data``.
        other_data: likewise.

    Raises:
        RecoveryError: any of them found a difference that nothing explains.
    """
    everyones = all_gather_objects(mine, Part)
    found = [f"rank {rank}: {what}" for rank, its in enumerate(everyones) for what in its.differences]
    unequal = unequal_replicas([its.replicas for its in everyones])
    is_explained = other_arithmetic and not any(its.differ_as_loaded for its in everyones)
    if found and is_explained and not unequal:
        if dist.get_rank() == 0:
            log.warning(
                f"{other_arithmetic}: what was replayed does not have the bits that were lost ({_some(found)}; the "
                f"largest relative difference is {max(its.recovery.largest_difference for its in everyones):.1e}). "
                "Training goes on from it, as from a checkpoint that is loaded elsewhere"
            )
    elif found or unequal:
        advice = "start again from a dense checkpoint or an older window"
        if other_data:
            advice = (
                f"the window was written with other data ({'; '.join(other_data)}). Load it with the data of then and "
                "let that job save a dense checkpoint (--save, --exit-interval 1); go on from that one with other data"
            )
        raise RecoveryError(
            f"the replayed state is not the one that was lost: {_some(found + unequal)}. Nothing of it may be used: "
            f"{advice}"
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
        largest_difference=max(one.largest_difference for one in recoveries),
        losses_until=None if losses == NONE else losses,
        sends=max(one.sends for one in recoveries),
        fetch_s=max(one.fetch_s for one in recoveries),
        replay_s=max(one.replay_s for one in recoveries),
        replay_cpu_s=sum(one.replay_cpu_s for one in recoveries),
    )


def _some(found: Sequence[str]) -> str:
    return "; ".join(found[:5]) + (f" (and {len(found) - 5} more)" if len(found) > 5 else "")
