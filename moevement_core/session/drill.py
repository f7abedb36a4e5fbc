"""The drill in which ranks lose all their state: what is recovered is compared with what was there."""

from __future__ import annotations

from collections.abc import Collection

from moevement_core import log
from moevement_core.digest import digest
from moevement_core.errors import ConfigError, RecoveryError
from moevement_core.recovery.outcome import Recovery
from moevement_core.session.binding import Binding
from moevement_core.session.exchange import all_gather_objects
from moevement_core.session.parts import Parts
from moevement_core.session.recoverer import Recoverer


def refuse_without_wipe(binding: Binding, wipe_at: Collection[int]) -> None:
    """Refuse the drill for a trainer that does not define it; before training begins, on every rank alike.

    Raises:
        ConfigError: the drill is asked for, and there is no ``Binding.wipe``.
    """
    if wipe_at and type(binding).wipe is Binding.wipe:
        raise ConfigError(
            f"--moevement-wipe-at {min(wipe_at)}: {type(binding).__name__} has no wipe(); define it, or drop the flag"
        )


def wipe_and_recover(
    parts: Parts, recoverer: Recoverer, committed: int, stages: frozenset[int] | None
) -> Recovery:  # fmt: skip
    """Overwrite the state of some ranks and bring it back; every rank calls it between two iterations.

    What comes back is compared with what was there, unless the recovery lost updates, and says so.

    Args:
        parts: of this rank.
        recoverer: this rank's.
        committed: the iteration whose state is live.
        stages: those whose ranks forget; None for all.

    Raises:
        RecoveryError: it was not recovered.
    """
    before = _digests(parts)
    if parts.topology.rank == 0:
        where = "every rank" if stages is None else f"stage {', '.join(map(str, sorted(stages)))}"
        log.info(f"wiping the state of iteration {committed} on {where}, as was asked for")
    parts.checkpointer.wait()
    parts.checkpointer.capturer.settle()
    if stages is None or parts.topology.stage in stages:
        parts.binding.wipe()
    done = recoverer.recover(committed, stages)
    if done.lost_tokens:
        if parts.topology.rank == 0:
            log.info(f"the state of iteration {committed} is not what was wiped: {done.losses}")
        return done
    after = _digests(parts)
    changed_parts = all_gather_objects([part for part in before if before[part] != after[part]], list[str])
    if any(changed_parts):
        raise RecoveryError(
            f"the state of iteration {committed} did not come back as it was before it was wiped: "
            + "; ".join(f"rank {rank}: {', '.join(parts[:5])}" for rank, parts in enumerate(changed_parts) if parts)
        )
    return done


def _digests(parts: Parts) -> dict[str, str]:
    boundary = parts.binding.boundary()
    return parts.checkpointer.capturer.whole_now() | {part: digest(value) for part, value in boundary.items()}
