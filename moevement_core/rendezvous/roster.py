"""What members and the coordinator write into the job's store, and what it means.

A *member* is a process that can take part: it has a number that no other process of the job ever had. A *generation*
is the time from one forming of the job to the next failure; its *roster* says which member is which rank. Members that
are in no roster are spares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

JOINED = "members/joined"
"""How many members have ever joined."""
MEMBER = "members/{}"
"""The card of the how many-th that joined."""
ROSTER = "generation/{}/roster"
LEFT = "generation/{}/left/{}"
"""A survivor has stopped what it did and waits for the next roster; by generation and member. Holds why."""
GIVEN_UP = "members/{}/given_up"
"""By member: it did not answer, and another one has taken its rank."""
NEWEST = "generation/newest"
DONE = "generation/{}/done/{}"
"""A rank has come to the end of the job."""
DEATHS = "deaths/told"
"""How many deaths have been told by whoever watches processes elsewhere."""
DEATH = "deaths/{}"
"""The how many-th: member, pid and how, in words."""
STOP = "stop"
"""Why the job ends, to be read by everyone who waits."""


@dataclass(frozen=True)
class Card:
    """How a member introduces itself."""

    member: int
    pid: int
    host: str
    node: str
    """Members of one node die together, and copies on it with them."""


@dataclass(frozen=True)
class Death:
    """A member that is gone."""

    member: int
    rank: int | None
    """None: it was a spare."""
    pid: int
    how: str
    """In words: ``was killed by signal 9``."""
    at: float
    """When that was noticed, seconds since the epoch."""


@dataclass(frozen=True)
class Roster:
    """Who is who in a generation."""

    generation: int
    ranks: Mapping[int, int]
    """The member that is each rank."""
    deaths: tuple[Death, ...] = ()
    """Since the last roster; empty if ranks only have to begin anew, because one of them failed and lives."""
    reasons: tuple[str, ...] = ()
    """Why ranks that live had to begin anew, in their words."""
    formed_at: float = 0.0
    """Seconds since the epoch."""
    first_formed_at: float = 0.0
    """Likewise, of the first generation."""
    left_at: float = 0.0
    """When the last survivor had stopped what it did."""
    spares: int = 0
    """Members that wait, this roster's not among them."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node of each rank."""

    def rank_of(self, member: int) -> int | None:
        """The rank that a member has."""
        return next((rank for rank, one in self.ranks.items() if one == member), None)

    def encode(self) -> str:
        """As it stands in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Roster:
        """The inverse of :meth:`encode`."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("ranks", "nodes"):  # JSON knows no numbers as keys
            fields[name] = {int(rank): value for rank, value in fields[name].items()}
        fields["deaths"] = tuple(Death(**death) for death in fields["deaths"])
        fields["reasons"] = tuple(fields["reasons"])
        return Roster(**fields)
