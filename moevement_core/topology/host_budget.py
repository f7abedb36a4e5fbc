"""Host memory that each rank may use and will need, and the decision whether ranks keep their own snapshots.

If a rank needs more memory than it may use, every rank drops each own snapshot as soon as all peers have it. Before
training begins, all ranks know the needs of every rank, so all make the same decision, or raise the same error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moevement_core.engine.config import BudgetConfig, KeepOwn
from moevement_core.errors import ConfigError
from moevement_core.util.host_memory import SHARE, node_memory

Kept = Callable[[Sequence["AtPeer"]], Sequence[int]]
"""Function that returns the bytes of host memory that each rank needs for snapshots of other ranks.

The argument has, for each rank, the memory that the rank's snapshots take on a peer.
"""


@dataclass(frozen=True)
class AtPeer:
    """Host memory that the snapshots of one rank take on each peer."""

    nbytes: int
    slots: tuple[int, ...] = ()
    """Bytes of each snapshot of a window."""
    count: int = 0
    """Number of snapshots that a peer keeps at a time."""
    staging: int = 0
    """Bytes of the buffer that receives a part of a snapshot before the part is added to a parity sum."""


@dataclass(frozen=True)
class Allowed:
    """Host memory that this rank may use."""

    nbytes: float
    why: str
    """Source of the limit, in words: a flag, or a share of the node's memory."""


def allowed(budget: BudgetConfig, nodes: Sequence[str], rank: int, *, is_bounded: bool = True) -> Allowed:
    """Return the host memory that flags allow, or otherwise this rank's share of the node's memory.

    Args:
        budget: flags of the job.
        nodes: node of every rank.
        rank: number of this rank.
        is_bounded: False if the memory that the strategy needs is not known before training. Then only a flag sets a
            limit.
    """
    if budget.host_memory_bytes is not None:
        return Allowed(budget.host_memory_bytes, "--moevement-host-memory-gb")
    if not is_bounded:
        return Allowed(math.inf, "no cap")
    memory, ranks = node_memory(), nodes.count(nodes[rank])
    among = f" for {ranks} ranks" if ranks > 1 else ""
    return Allowed(memory.nbytes * SHARE / ranks, f"{SHARE:.0%} of {memory}{among}")


@dataclass(frozen=True)
class Needs:
    """Host memory that one rank needs, in bytes."""

    snapshots: int
    """Bytes for the rank's own snapshots if the rank keeps a snapshot after all peers have it."""
    in_flight: int
    """Bytes for the rank's own snapshots if the rank keeps only those that some peer may lack."""
    at_peer: AtPeer
    """Memory that the rank's snapshots take on each peer."""
    log: int
    """Bytes for the boundary log."""
    allowed: Allowed

    def own(self, *, keeps_own_copies: bool) -> int:
        """Return the bytes for own snapshots; with ``keeps_own_copies``, also for those that all peers have."""
        return self.snapshots if keeps_own_copies else self.in_flight


@dataclass(frozen=True)
class Total:
    """Total host memory that one rank needs, in bytes by purpose."""

    rank: int
    own: int
    """Bytes for the rank's own snapshots."""
    kept: int
    """Bytes for snapshots of other ranks."""
    log: int
    """Bytes for the boundary log."""
    allowed: Allowed

    @property
    def nbytes(self) -> int:
        """Bytes for all purposes together."""
        return self.own + self.kept + self.log

    @property
    def beyond(self) -> float:
        """Bytes that the rank needs beyond the memory that it may use; negative if memory is left."""
        return self.nbytes - self.allowed.nbytes

    def __str__(self) -> str:
        return (
            f"rank {self.rank} needs {gigabytes(self.nbytes)} GB ({self.own / 1e9:.3f} for its own snapshots, "
            f"{self.kept / 1e9:.3f} for snapshots of other ranks, {self.log / 1e9:.3f} for logs)"
        )


def totals(needs: Sequence[Needs], kept: Kept, *, keeps_own_copies: bool) -> list[Total]:
    """Return the host memory that each rank needs in all, computed in time linear in the number of ranks."""
    at_peer = kept([need.at_peer for need in needs])
    return [
        Total(
            rank,
            own=need.own(keeps_own_copies=keeps_own_copies),
            kept=at_peer[rank],
            log=need.log,
            allowed=need.allowed,
        )
        for rank, need in enumerate(needs)
    ]


def worst(needs: Sequence[Needs], kept: Kept, *, keeps_own_copies: bool) -> Total:
    """Return the largest total by :attr:`Total.beyond`; of several equal totals, that of the lowest rank."""
    return max(totals(needs, kept, keeps_own_copies=keeps_own_copies), key=lambda total: (total.beyond, -total.rank))


def decide_keep_own(
    needs: Sequence[Needs], kept: Kept, budget: BudgetConfig, window: int, changes: Sequence[tuple[str, Kept]], *,
    may_drop: bool,
) -> tuple[bool, Total]:  # fmt: skip
    """Decide whether ranks keep own snapshots that all peers have. They do so if every rank has enough memory for it.

    Args:
        needs: needs of every rank.
        kept: function that computes each rank's memory for snapshots of other ranks, with the protection (copies or
            parity) that the flags ask for.
        budget: flags of the job.
        window: W, for the message.
        changes: weaker protections: for each, the flag that asks for it, and the function that replaces ``kept``.
        may_drop: False if own snapshots have to stay, because they are written to disk or are a part of parity, or
            because some rank has too few peers.

    Returns:
        True if ranks keep own snapshots that all peers have; and the need of the rank with the least memory left.

    Raises:
        ConfigError: some rank has too little memory, and dropping these snapshots is forbidden or does not suffice. The
            message names the cheapest remedy.
    """
    choices = {KeepOwn.ALWAYS: [True], KeepOwn.NEVER: [False], KeepOwn.AUTO: [True, False]}[budget.keep_own]
    for keeps_own_copies in choices if may_drop else [True]:
        if (total := worst(needs, kept, keeps_own_copies=keeps_own_copies)).beyond <= 0:
            return keeps_own_copies, total
    change = next(_cheapest(needs, kept, total, changes, keeps_own_copies=keeps_own_copies, may_drop=may_drop))
    raise ConfigError(
        f"host memory: {total} at W = {window}; {total.allowed.nbytes / 1e9:.3f} GB are allowed "
        f"({total.allowed.why}). The cheapest change that makes it fit: {change}"
    )


def _cheapest(
    needs: Sequence[Needs], kept: Kept, total: Total, changes: Sequence[tuple[str, Kept]], *, keeps_own_copies: bool,
    may_drop: bool,
) -> Iterator[str]:  # fmt: skip
    """Yield changes of flags with which every rank has enough memory, the least costly change first."""
    if keeps_own_copies and may_drop and worst(needs, kept, keeps_own_copies=False).beyond <= 0:
        yield "--moevement-keep-own auto"
    unlogged = [replace(need, log=0) for need in needs]
    if (
        any(need.log for need in needs)
        and (left := -worst(unlogged, kept, keeps_own_copies=keeps_own_copies).beyond) > 0
    ):
        yield f"--moevement-log-memory-gb {math.floor(left / 1e6) / 1e3:.3f}"
    for flag, other in changes:
        if worst(needs, other, keeps_own_copies=keeps_own_copies or not may_drop).beyond <= 0:
            yield flag
    yield (
        f"--moevement-host-memory-gb {gigabytes(total.nbytes)}, if the node has so much memory; or else another window "
        "or strategy"
    )


def gigabytes(nbytes: float) -> str:
    """Return bytes as gigabytes with three decimals, rounded up, so that a user can give the result to a flag."""
    return f"{math.ceil(nbytes / 1e6) / 1e3:.3f}"
