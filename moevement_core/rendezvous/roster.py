"""Messages of members and the coordinator in the job's store.

A *member* is a process that can take part: its number is one that no other process of the job ever had. A *generation*
is the time from one forming of the job to the next failure; its *roster* says which member is which rank. Members that
are in no roster are spares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from moevement_core.errors import ExchangeError

JOB_NAME = "job/name"
"""Eight hexadecimal digits."""
RANKS = "job/ranks"
"""Key of the number of ranks of the job."""
TASK = "tasks/{}"
"""Which process runs the n-th of the tasks that were started together."""
LATE_TASK = "tasks/late/{}"
"""Which process runs the n-th of the tasks that have come later, on nodes that were repaired or added."""
JOINED = "members/joined"
"""Rings when a member has joined."""
CARDS = "members/card/"
MEMBER = CARDS + "{}/{}"
"""Key of a member's information, by member and the tag of its number."""
ROSTER = "generation/{}/roster"
"""A proposal, until :data:`START` says that all of its members have acknowledged it."""
ACKNOWLEDGED = "generation/{}/acknowledged"
"""Rings when a member has acknowledged the roster; and by member, with ``/member`` behind it, that it has."""
START = "generation/{}/start"
"""``go``, or ``superseded`` when a member of the roster was lost before all had acknowledged it."""
LEFT = "generation/{}/left"
"""Rings when a survivor has left the generation and waits for the next roster; and by member why."""
LEAVING = "generation/{}/leaving"
"""Key of the phase of leaving that a member is in, where that takes long."""
FINISHED = "generation/{}/finished"
"""Rings when a rank has come to the end of training; and by member."""
INTERRUPTED = "generation/{}/interrupted"
"""Key of the interruption of a generation, and of the rank that caused it."""
GIVEN_UP = "members/{}/given_up"
"""Key of the note that the job continues without a member."""
GIVEN_BACK = "members/given_back"
"""Rings when a member has given its rank back; and by member, with ``/member`` behind it, the :class:`GivenBack`."""
NEWEST = "generation/newest"
ELASTIC = "job/elastic"
"""The :class:`~moevement_core.rendezvous.resizing.Grid` of a job that may change its size."""
BLOCKS = "job/blocks"
"""Key of how many consecutive ranks communicate in every layer and should be on one node: one or
more numbers (``2,8``).
"""
STOP = "stop"
"""Why the job ends; empty when it has come to its end."""


class NoticedBy(StrEnum):
    """Detectors of a death."""

    SUPERVISOR = "supervisor"
    """Supervisor that started the process and saw it end."""
    RESET = "reset"
    """The connection to the supervisor broke: its processes end with it."""
    LEASE = "lease"
    """Nothing was heard of the process for the lease time, or its supervisor found it stopped."""
    TIMEOUT = "timeout"
    """The process did not stop what it did after an interruption, or did not acknowledge a roster."""
    RESULT = "result"
    """The process lives and computes results that are not finite."""
    DEVICE = "device"
    """The process gave its rank back because its device cannot be used."""


@dataclass(frozen=True)
class MemberInfo:
    """Introduction of a member to the job."""

    member: int
    pid: int
    host: str
    node: str
    """Members of one node die together, and copies on it with them."""
    device: int = 0
    """The number of the device that it was started for, as it counts devices."""
    devices: tuple[str, ...] = ()
    """Identities of the devices that it sees, in the order of the numbers that it gives them; empty without a GPU."""

    def encode(self) -> str:
        """Return the text that stands in the store."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> MemberInfo:
        """The inverse of :meth:`encode`.

        Raises:
            ExchangeError: it is none.
        """
        return _decoded(text, MemberInfo)


@dataclass(frozen=True)
class GivenBack:
    """Word of a member that it can do nothing with its device any more, and ends."""

    reason: str
    """Reason in words."""
    device: str = ""
    """The identity of the device; empty if it has none."""
    is_broken: bool = False
    """True if no other process can use the device, either."""

    def encode(self) -> str:
        """Return the text that stands in the store."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> GivenBack:
        """The inverse of :meth:`encode`.

        Raises:
            ExchangeError: it is none.
        """
        return _decoded(text, GivenBack)


@dataclass(frozen=True)
class Death:
    """A member that is gone."""

    member: int
    rank: int | None
    """Rank of the process; None if it was a spare."""
    pid: int
    how: str
    """Cause in words: ``was killed by signal 9``."""
    at: float
    """Time at which the death was noticed, in seconds since the epoch."""
    noticed_by: str = NoticedBy.SUPERVISOR
    last_seen: float = 0.0
    """Time at which the process was last known to live, in seconds since the epoch."""


@dataclass(frozen=True)
class Roster:
    """Assignment of ranks to members in a generation."""

    generation: int
    ranks: Mapping[int, int]
    """The member that is each rank."""
    deaths: tuple[Death, ...] = ()
    """Deaths since the last generation that started; empty if ranks only restart because a live one of them failed."""
    earlier: tuple[Death, ...] = ()
    """Deaths before those, the recovery from which was interrupted."""
    reasons: tuple[str, ...] = ()
    """Why ranks that live had to restart, in their words."""
    formed_at: float = 0.0
    """Seconds since the epoch."""
    first_formed_at: float = 0.0
    """Likewise, of the first generation."""
    left_at: float = 0.0
    """Time at which the last survivor had stopped, in seconds since the epoch."""
    ranks_before: int | None = None
    """Number of ranks of the last generation that entered training, where this one has another number."""
    spares: int = 0
    """Members that wait, this roster's not among them."""
    starting: int = 0
    """Processes that are being started in the place of others, and will be spares."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node of each rank."""
    devices: Mapping[int, int] = field(default_factory=dict)
    """The number of each rank's device, as its process counts devices."""
    identities: Mapping[int, str] = field(default_factory=dict)
    """The identity of each rank's device; empty where it has none."""

    split: tuple[tuple[int, int], ...] = ()
    """First and last rank of each block that has come to span nodes with this roster."""

    def nodes_of(self, first: int, last: int) -> tuple[str, ...]:
        """Return the nodes that ranks ``first`` to ``last`` are on."""
        return tuple(sorted({self.nodes[rank] for rank in range(first, last + 1)}))

    def rank_of(self, member: int) -> int | None:
        """The rank that a member has."""
        return next((rank for rank, holder in self.ranks.items() if holder == member), None)

    def encode(self) -> str:
        """Return the text that stands in the store."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> Roster:
        """The inverse of :meth:`encode`.

        Raises:
            ExchangeError: it is none.
        """
        return _decoded(text, Roster)


def _decoded[T](text: str | bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ExchangeError(f"no {kind.__name__}: {error}; all processes need the same version") from None
