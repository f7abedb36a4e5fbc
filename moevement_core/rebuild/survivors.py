"""Check of the state that survivors kept, before training continues.

A replay proves the state that it recomputes, but survivors recompute nothing. Two comparisons check their state. Each
survivor compares its state with the digests in its snapshot of the resume iteration, if it has one. That snapshot may
hold digests of some operators or of all. Data-parallel replicas compare their weights with each other. The check also
refuses gradients that the interrupted iteration left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moevement_core.audit.replicas import ReplicaDigest, compact, unequal_replicas
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.errors import RecoveryError
from moevement_core.recovery.check import StateCheck
from moevement_core.topology.parts import RankParts
from moevement_core.trainer.capabilities import SupportsGradientChecks, replica_digests


@dataclass(frozen=True)
class SurvivorChecks:
    """Numbers of survivors by the part of their state that was compared; the same numbers on every rank."""

    ranks: int
    """Number of ranks that kept their state."""
    in_part: int
    """Number of survivors compared in part: their snapshot has digests of only some operators' full state."""
    whole: int
    """Number of survivors compared with digests of the whole state."""

    def __str__(self) -> str:
        if not self.ranks:
            return "no rank kept its state"
        rest = self.ranks - self.in_part - self.whole
        return (
            f"{self.ranks} ranks kept their state, and no gradients are left over; compared with the newest snapshot: "
            f"{self.whole} in whole, {self.in_part} in part, {rest} not at all; replicas have equal weights"
        )

    @property
    def summary(self) -> str:
        """Text with the numbers of survivors and of survivors whose state was compared."""
        if not self.ranks:
            return "no rank kept its state"
        return f"{self.in_part + self.whole} of {self.ranks} checked, unchanged"


@dataclass(frozen=True)
class _Compared:
    kept: bool = False
    in_part: bool = False
    whole: bool = False
    differences: list[str] = field(default_factory=list)
    replicas: list[ReplicaDigest] = field(default_factory=list)


def check_kept(parts: RankParts, until: int, *, is_kept: bool, replicas_are_known: bool) -> SurvivorChecks:
    """Compare the kept state of all survivors. Every rank calls it while ``state@until`` is live.

    Args:
        parts: objects of this rank that a recovery uses.
        until: iteration whose state the job resumes from.
        is_kept: True if this rank kept its state and re-executed nothing.
        replicas_are_known: True if this recovery has already compared the weights of data-parallel replicas.

    Raises:
        RecoveryError: the state of a rank differs from the expected one. Every rank raises it.
    """
    compared = _compare(parts, until) if is_kept else _Compared()
    replicas = [] if replicas_are_known else compact(replica_digests(parts.binding))
    per_rank: list[_Compared] = all_gather_objects(replace(compared, replicas=replicas), _Compared)
    wrong = [f"rank {rank}: {what}" for rank, other in enumerate(per_rank) for what in other.differences]
    wrong += unequal_replicas([other.replicas for other in per_rank])
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise RecoveryError(
            f"survivors hold another state than that of iteration {until}: {'; '.join(wrong[:5])}{more}. Their state "
            "must not be used: start again from a dense checkpoint or a window on disk"
        )
    return SurvivorChecks(*(sum(getattr(other, name) for other in per_rank) for name in ("kept", "in_part", "whole")))


def _compare(parts: RankParts, until: int) -> _Compared:
    gradients = parts.binding.gradients_left() if isinstance(parts.binding, SupportsGradientChecks) else ()
    left = [f"{what} of the interrupted iteration" for what in gradients]
    snapshot = parts.checkpointer.own.snapshots.get(until)
    if snapshot is None or snapshot.header.state != until:
        return _Compared(kept=True, differences=left)
    check = StateCheck(parts.states, parts.checkpointer.capturer.whole_now)
    check.compare(snapshot, frozenset(parts.states), frozenset())
    whole = {name for name, state in parts.states.items() if state.full} <= (snapshot.header.whole or {}).keys()
    return _Compared(kept=True, in_part=not whole, whole=whole, differences=[*left, *check.differences])
