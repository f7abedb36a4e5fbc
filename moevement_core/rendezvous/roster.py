"""What members and the coordinator write into the job's store, and what it means.

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
"""How many ranks the job has."""
TASK = "tasks/{}"
"""Which process runs the n-th of the tasks that were started together."""
LATE_TASK = "tasks/late/{}"
"""Which process runs the n-th of the tasks that have come later, on nodes that were repaired or added."""
JOINED = "members/joined"
"""Rings when a member has joined."""
CARDS = "members/card/"
MEMBER = CARDS + "{}/{}"
"""By member, with the tag of its number, its information."""
ROSTER = "generation/{}/roster"
"""A proposal, until :data:`START` says that all of its members have acknowledged it."""
ACKNOWLEDGED = "generation/{}/acknowledged"
"""Rings when a member has acknowledged the roster; and by member, with ``/member`` behind it, that it has."""
START = "generation/{}/start"
"""``go``, or ``superseded`` when a member of the roster was lost before all had acknowledged it."""
LEFT = "generation/{}/left"
"""Rings when a survivor has left the generation and waits for the next roster; and by member why."""
LEAVING = "generation/{}/leaving"
"""By member: the phase of leaving that it is in, where that takes long."""
FINISHED = "generation/{}/finished"
"""Rings when a rank has come to the end of training; and by member."""
INTERRUPTED = "generation/{}/interrupted"
"""That ranks are to leave the generation, and which of them is why."""
GIVEN_UP = "members/{}/given_up"
"""By member: the job goes on without it."""
GIVEN_BACK = "members/given_back"
"""Rings when a member has given its rank back; and by member, with ``/member`` behind it, the :class:`GivenBack`."""
NEWEST = "generation/newest"
ELASTIC = "job/elastic"
"""The :class:`~moevement_core.rendezvous.resizing.Grid` of a job that may change its size."""
BLOCKS = "job/blocks"
"""How many consecutive ranks communicate in every layer, and should be on one node: one or more numbers (``2,8``)."""
STOP = "stop"
"""Why the job ends; empty when it has come to its end."""


class NoticedBy(StrEnum):
    """What a death was noticed by."""

    SUPERVISOR = "supervisor"
    """Who started the process saw it end."""
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
    """How a member introduces itself."""

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
        """As it stands in the store."""
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
    """In words."""
    device: str = ""
    """The identity of the device; empty if it has none."""
    is_broken: bool = False
    """Whether nobody else can use the device, either."""

    def encode(self) -> str:
        """As it stands in the store."""
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
    """None: it was a spare."""
    pid: int
    how: str
    """In words: ``was killed by signal 9``."""
    at: float
    """When that was noticed, seconds since the epoch."""
    noticed_by: str = NoticedBy.SUPERVISOR
    last_seen: float = 0.0
    """When it was last known to live, seconds since the epoch."""


@dataclass(frozen=True)
class Roster:
    """Who is who in a generation."""

    generation: int
    ranks: Mapping[int, int]
    """The member that is each rank."""
    deaths: tuple[Death, ...] = ()
    """Since the last generation that started; empty if ranks only restart because one of them failed and lives."""
    earlier: tuple[Death, ...] = ()
    """Those before, the recovery from which was interrupted."""
    reasons: tuple[str, ...] = ()
    """Why ranks that live had to restart, in their words."""
    formed_at: float = 0.0
    """Seconds since the epoch."""
    first_formed_at: float = 0.0
    """Likewise, of the first generation."""
    left_at: float = 0.0
    """When the last survivor had stopped what it did."""
    ranks_before: int | None = None
    """How many ranks the last generation had that entered training, where this one has another number."""
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
        """As it stands in the store."""
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
