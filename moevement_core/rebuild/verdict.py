"""Verdict of all ranks on a recovery: the recovered state equals the lost state, or an error ends the recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from moevement_core import log
from moevement_core.audit.replicas import ReplicaDigest, unequal_replicas
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.errors import RecoveryError
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.run.outcome import Recovery
from moevement_core.util.iterations import newest_of, reached_by_all


@dataclass(frozen=True)
class RankVerdict:
    """Result of a recovery on one rank, in the form that the rank sends to all others."""

    recovery: Recovery
    lost: LostTokens
    differences: list[str]
    """Differences from the lost state."""
    differ_as_loaded: bool
    """True if one of the differences is in state that was loaded and not updated afterwards."""
    replicas: list[ReplicaDigest]
    """Digests of state that must be equal on several ranks, survivors included."""


def agree(own: RankVerdict, other_arithmetic: str, other_data: Sequence[str] = ()) -> Recovery:
    """Return the summary of the recovery over all ranks. Every rank calls it.

    Before the call, each rank that replayed has compared the part of the state that it saves. If ``other_arithmetic``
    explains all differences, rank 0 logs them, and training continues. It cannot explain a difference between
    replicas, or in state that was loaded and not updated, so such a difference is always an error.

    Args:
        own: result of this rank.
        other_arithmetic: reason why last bits may differ, as in :class:`~moevement_core.rebuild.prepare.Prepared`.
        other_data: data flags that differ, as in ``Prepared``; the error message lists them.

    Raises:
        RecoveryError: a rank found an unexplained difference. Every rank raises it.
    """
    parts = all_gather_objects(own, RankVerdict)
    differences = [f"rank {rank}: {what}" for rank, part in enumerate(parts) for what in part.differences]
    unequal = unequal_replicas([part.replicas for part in parts])
    is_explained = other_arithmetic and not any(part.differ_as_loaded for part in parts)
    if differences and is_explained and not unequal:
        if dist.get_rank() == 0:
            log.warning(
                f"{other_arithmetic}: the replayed state differs from the lost one ({_some(differences)}; "
                f"the largest relative difference is {max(part.recovery.largest_difference for part in parts):.1e}). "
                "Training continues from the replayed state, as it would after loading a checkpoint on another machine"
            )
    elif differences or unequal:
        advice = "start again from a dense checkpoint or an older window"
        if other_data:
            advice = (
                f"the window was written with other data ({'; '.join(other_data)}). Load the window with that data, "
                "and save a dense checkpoint (--save, --exit-interval 1); then load this checkpoint with the new data"
            )
        raise RecoveryError(
            f"the replayed state is not the lost one: {_some(differences + unequal)}. "
            f"The replayed state must not be used: {advice}"
        )
    recoveries, lost = [part.recovery for part in parts], own.lost
    known = reached_by_all(recovery.restored_until for recovery in recoveries)
    recomputed = sum(recovery.recomputed for recovery in recoveries)
    by_stage: dict[str, int] = {}
    for part in parts:
        lost |= part.lost  # the same on all ranks of a stage
        for stage, count in part.recovery.replayed_by_stage.items():
            by_stage[stage] = max(count, by_stage.get(stage, 0))
    return replace(
        own.recovery,
        replayed=max(recovery.replayed for recovery in recoveries),
        redone=max(recovery.redone for recovery in recoveries),
        replayed_by_stage=dict(sorted(by_stage.items(), key=lambda item: int(item[0]))),
        lost_tokens=lost.by_expert,
        proportion_lost=lost.proportion,
        proportion_lost_so_far=lost.proportion_so_far,
        fed_bytes=sum(recovery.fed_bytes for recovery in recoveries),
        verified_until=known if recomputed else None,
        restored_until=known,
        recomputed=recomputed,
        restored=sum(recovery.restored for recovery in recoveries),
        largest_difference=max(recovery.largest_difference for recovery in recoveries),
        losses_until=newest_of(recovery.losses_until for recovery in recoveries),
        sends=max(recovery.sends for recovery in recoveries),
        fetch_s=max(recovery.fetch_s for recovery in recoveries),
        replay_s=max(recovery.replay_s for recovery in recoveries),
        replay_cpu_s=sum(recovery.replay_cpu_s for recovery in recoveries),
    )


def _some(differences: Sequence[str]) -> str:
    return "; ".join(differences[:5]) + (f" (and {len(differences) - 5} more)" if len(differences) > 5 else "")
