"""Plain data about the places of snapshots, and about the parity sums that lost snapshots are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Source(IntEnum):
    """Source of a snapshot; the quickest source has the smallest value."""

    MEMORY = 0
    """Host memory of the rank that took the snapshot."""
    PEER = 1
    """Host memory of a peer."""
    PARITY = 2
    """Parity. No rank holds the snapshot, so ranks compute it from parity and the other snapshots of its group."""
    REPLICA = 3
    """Training state of a live replica, from which the replica makes the snapshot."""
    FILE = 4


@dataclass(frozen=True, slots=True)
class SumTerm:
    """Contribution of one rank to a sum that yields a lost snapshot: the bytes of a snapshot or a parity block."""

    rank: int
    source: Source
    owner: int
    """Rank that took the snapshot; for a block of parity, the first member of its group."""
    coefficient: int
    """Factor by which the rank multiplies the bytes, in GF(256)."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum whose result is a lost snapshot."""

    terms: tuple[SumTerm, ...]
    nbytes: int
    """Bytes of the snapshot in the form in which it is sent."""

    @property
    def chain(self) -> tuple[int, ...]:
        """Ranks that add to the sum, in order. The last rank holds the parity block and the snapshot's header."""
        last = self.terms[-1].rank
        return (*dict.fromkeys(term.rank for term in self.terms if term.rank != last), last)


@dataclass(frozen=True, slots=True)
class Holding:
    """Description of a snapshot that a rank can send to the snapshot's owner."""

    owner: int
    """Rank that took the snapshot."""
    iteration: int
    state: int
    """Iteration whose state the snapshot holds; see ``Header.state``."""
    schedule: str
    contents: str
    source: Source
    sum: Sum | None = None
    """Sum whose result is the snapshot; None if a rank holds the snapshot."""


Place = tuple[Source, int, Holding]
"""Place of a snapshot: its source, the rank that can send it, and its description."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch of a snapshot of ``owner`` from ``holder``, which may be the same rank."""

    owner: int
    iteration: int
    holder: int
    source: Source
    sum: Sum | None = None
    was_sent: bool = False
    """True if the holder sent the snapshot intact, and it was damaged on the way."""
