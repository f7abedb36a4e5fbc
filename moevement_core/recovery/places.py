"""Where a snapshot is, or what it follows from: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Source(IntEnum):
    """Where a snapshot is, the quickest first."""

    MEMORY = 0
    """Host memory of the rank that took it."""
    PEER = 1
    """Host memory of a peer."""
    PARITY = 2
    """Nowhere; it follows from others of its group and from parity."""
    REPLICA = 3
    """Live state of a rank that has the same."""
    FILE = 4


@dataclass(frozen=True, slots=True)
class Term:
    """What a rank adds to a sum."""

    rank: int
    source: Source
    owner: int
    """Of the snapshot; of parity the first member of the group."""
    coefficient: int
    """In GF(256)."""


@dataclass(frozen=True, slots=True)
class Sum:
    """What a snapshot follows from."""

    terms: tuple[Term, ...]
    nbytes: int
    """Of the snapshot, as it is sent."""

    @property
    def chain(self) -> tuple[int, ...]:
        """Ranks that add to it, in the order in which it comes by; the last has parity, and the header."""
        last = self.terms[-1].rank
        return (*dict.fromkeys(term.rank for term in self.terms if term.rank != last), last)


@dataclass(frozen=True, slots=True)
class Holding:
    """A whole snapshot that a rank can hand out."""

    owner: int
    """The rank that took it."""
    iteration: int
    state: int
    """The iteration whose state it holds."""
    schedule: str
    contents: str
    source: Source
    sum: Sum | None = None
    """What it follows from, where it is nowhere."""


Place = tuple[Source, int, Holding]
"""Where a snapshot is: how, on which rank, and what is there."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A snapshot of ``owner`` that ``holder`` hands out, to itself if it is the owner."""

    owner: int
    iteration: int
    holder: int
    source: Source
    sum: Sum | None = None
    was_sent: bool = False
    """Whether the holder had it, whole, and it was damaged on its way."""
