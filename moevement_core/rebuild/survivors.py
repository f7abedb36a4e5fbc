"""Comparison of the state that survivors kept with digests of it, before training continues.

A replay proves what it recomputed, but a survivor recomputed nothing. Its state is compared with two other things: its
newest snapshot, if that belongs to the resume iteration, and its data-parallel replicas. A snapshot may hold digests of
some operators or of all. No gradients of the interrupted iteration may be left.
"""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.comms.exchange import all_gather_objects
from moevement_core.errors import RecoveryError
from moevement_core.rebuild.replica_digests import unequal_replicas
from moevement_core.recovery.check import StateCheck
from moevement_core.topology.parts import Parts
from moevement_core.trainer.binding import Replicas


@dataclass(frozen=True)
class SurvivorChecks:
    """Number of survivors by how much of their state was compared; the same on every rank."""

    ranks: int
    """Ranks that kept their state."""
    in_part: int
    """Survivors compared with a snapshot of some full state and of compute weights."""
    whole: int
    """Survivors compared with digests of the whole state."""

    def __str__(self) -> str:
        if not self.ranks:
            return "no rank kept its state"
        rest = self.ranks - self.in_part - self.whole
        return (
            f"{self.ranks} ranks kept their state, without gradients left over; compared with their newest snapshot: "
            f"{self.whole} in whole, {self.in_part} in part, {rest} not; replicas have the same weights"
        )

    @property
    def summary(self) -> str:
        """Return in words how many ranks kept their state, and how many of them were compared."""
        if not self.ranks:
            return "none kept its state"
        return f"{self.in_part + self.whole} of {self.ranks} checked, unchanged"


@dataclass(frozen=True)
class _Compared:
    kept: bool
    in_part: bool
    whole: bool
    differences: list[str]
    replicas: list[Replicas]


def check_kept(parts: Parts, until: int, *, is_kept: bool, replicas_are_known: bool) -> SurvivorChecks:
    """Compare the kept state of all survivors. Every rank calls it while ``state@until`` is live.

    Args:
        parts: parts of this rank.
        until: iteration whose state the job resumes from.
        is_kept: True if this rank kept its state and replayed nothing.
        replicas_are_known: True if the replay already compared the replicas.

    Raises:
        RecoveryError: the state of a rank differs from the expected one. On every rank alike.
    """
    compared = _compare(parts, until) if is_kept else _Compared(False, False, False, [], [])
    replicas = [] if replicas_are_known else parts.binding.replicas()
    per_rank: list[_Compared] = all_gather_objects(
        _Compared(compared.kept, compared.in_part, compared.whole, compared.differences, replicas), _Compared
    )
    wrong = [f"rank {rank}: {what}" for rank, other in enumerate(per_rank) for what in other.differences]
    wrong += unequal_replicas([other.replicas for other in per_rank])
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise RecoveryError(
            f"what ranks kept is not the state of iteration {until}: {'; '.join(wrong[:5])}{more}. Nothing of it may "
            "be used: start again from a dense checkpoint or a window on disk"
        )
    return SurvivorChecks(*(sum(getattr(other, name) for other in per_rank) for name in ("kept", "in_part", "whole")))


def _compare(parts: Parts, until: int) -> _Compared:
    left = [f"{what} of the interrupted iteration" for what in parts.binding.gradients_left()]
    snapshot = parts.checkpointer.own.snapshots().get(until)
    if snapshot is None or snapshot.header.state != until:
        return _Compared(True, False, False, left, [])
    check = StateCheck(parts.states, parts.checkpointer.capturer.whole_now)
    check.compare(snapshot, frozenset(parts.states), frozenset())
    whole = {name for name, state in parts.states.items() if state.full} <= (snapshot.header.whole or {}).keys()
    return _Compared(True, not whole, whole, [*left, *check.differences], [])
