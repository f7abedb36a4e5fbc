"""Drill that overwrites the state of ranks, recovers it, and compares digests from before and after."""

from __future__ import annotations

from collections.abc import Collection

from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.errors import ConfigError, RecoveryError
from moevement_core.run.outcome import Recovery
from moevement_core.session.recoverer import Recoverer
from moevement_core.topology.parts import RankParts
from moevement_core.trainer.capabilities import SupportsWipe
from moevement_core.trainer.interface import BindingInterface
from moevement_core.util.digest import digest


def refuse_without_wipe(binding: BindingInterface, wipe_at: Collection[int]) -> None:
    """Refuse a drill if the trainer cannot overwrite its state. Every rank calls this before training begins.

    Args:
        binding: binding of the trainer.
        wipe_at: iterations after which ``--moevement-wipe-at`` asks for a drill; empty without a drill.

    Raises:
        ConfigError: a drill was requested, and the binding has no ``wipe``.
    """
    if wipe_at and not isinstance(binding, SupportsWipe):
        raise ConfigError(
            f"--moevement-wipe-at {min(wipe_at)}: {type(binding).__name__} has no wipe(); define it, or drop the flag"
        )


def wipe_and_recover(
    parts: RankParts, recoverer: Recoverer, committed: int, stages: frozenset[int] | None
) -> Recovery:  # fmt: skip
    """Overwrite the state of some ranks, and recover it. Every rank calls it between two iterations.

    The function compares digests from before the wipe with digests of the recovered state. If the strategy loses
    updates in a recovery, these digests differ. In that case rank 0 logs how many updates are lost instead.

    Args:
        parts: objects of this rank that a recovery uses.
        recoverer: recoverer of this rank.
        committed: iteration whose state is live.
        stages: pipeline stages whose ranks lose their state; None for all stages.

    Raises:
        RecoveryError: the state is unrecoverable, or differs from the state before the drill.
    """
    before = _digests(parts)
    if parts.topology.rank == 0:
        where = "every rank" if stages is None else f"stage {', '.join(map(str, sorted(stages)))}"
        log.info(f"wiping the state of iteration {committed} on {where}, as --moevement-wipe-at asks for")
    parts.checkpointer.wait()
    parts.checkpointer.capturer.settle()
    if stages is None or parts.topology.stage in stages:
        assert isinstance(parts.binding, SupportsWipe)
        parts.binding.wipe()
    done = recoverer.recover(committed, stages)
    if done.lost_tokens:
        if parts.topology.rank == 0:
            log.info(
                f"the restored state of iteration {committed} differs from the state before the wipe: {done.losses}"
            )
        return done
    after = _digests(parts)
    changed_parts = all_gather_objects([part for part in before if before[part] != after[part]], list[str])
    if any(changed_parts):
        raise RecoveryError(
            f"the restored state of iteration {committed} differs from the state before the wipe: "
            + "; ".join(f"rank {rank}: {', '.join(parts[:5])}" for rank, parts in enumerate(changed_parts) if parts)
        )
    return done


def _digests(parts: RankParts) -> dict[str, str]:
    boundary = parts.binding.boundary()
    return parts.checkpointer.capturer.whole_now() | {part: digest(value) for part, value in boundary.items()}
