"""Keys and values that members and the coordinator share (:mod:`moevement_core.rendezvous.values`).

A *member* is a process that can be a rank; its number is unique among all processes of the job. A *generation* is the
time from one forming of the job to the next failure. Its *roster* says which member has which rank. Members without a
rank are spares.

Some keys are *topics*: members report to the coordinator under the topic with ``/MEMBER`` appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec
import xxhash

from moevement_core.errors import ExchangeError

JOB_NAME = "job/name"
"""Key of the job's name: eight hexadecimal digits."""
RANKS = "job/ranks"
"""Key of the number of ranks of the job."""
STORE = "job/store"
"""Key of the address, ``HOST:PORT``, of the store of torch's process groups."""
TASK = "tasks/{}"
"""Key with which a process claims the number of a task (a supervisor under Slurm) that was started with the job."""
LATE_TASK = "tasks/late/{}"
"""Key with which a process claims a number for a task that joins later, on a repaired or added node."""
JOINED = "members/joined"
"""Topic of the :class:`MemberInfo` with which a member joins."""
GENERATION = "generation/{}/"
"""Prefix of the topics of a generation."""
ROSTER = "generation/roster"
"""Key of the newest roster: its generation, and after a space the :class:`Roster` without its entries by rank. It is a
proposal until the coordinator decides (:data:`START`)."""
SHARD = "generation/roster/{}"
"""Key of the newest :class:`RosterShard` with the entries of some members; the placeholder is the shard's number. The
value is the generation, and after a space the shard."""
SHARDS = "generation/shards"
"""Key of the numbers of the shards with entries: the generation, and after a space the numbers with commas between."""
MEMBERS_IN_SHARD = 64
"""Number of consecutive member numbers whose entries are in one shard.

Each node reads the shards of its members. So N members read O(N) bytes in all, and the coordinator sets N / 64 values.
"""
ACKNOWLEDGED = "generation/{}/acknowledged"
"""Topic of members that have acknowledged the roster; the reports are empty."""
START = "generation/start"
"""Key of the newest decision on a proposed roster: its generation, and after a space ``go`` when all its members have
acknowledged it, or ``superseded`` if a failure came first."""
LEFT = "generation/{}/left"
"""Topic of survivors that have left the generation (:meth:`Member.leave`)."""
LEAVING = "generation/{}/leaving"
"""Topic of members that take long to leave a generation; a report is the phase that the member has reached."""
FINISHED = "generation/{}/finished"
"""Topic of members that have reached the end of training; the reports are empty."""
GROUPS = "generation/{}/groups"
"""Prefix of the keys of torch's process groups of a generation, in the store that serves them alone."""
INTERRUPTED = "generation/interrupted"
"""Key of the newest interruption: the generation's number, and after a space the failed rank and the kind of failure.
All generations before this one are over."""
GIVEN_UP = "members/{}/given_up"
"""Key, by member, of the reason why the job goes on without it."""
UNUSABLE_DEVICE = "members/unusable_device"
"""Topic of members that give their rank back; a report is an :class:`UnusableDevice`."""
DEPARTING = "generation/{}/departing"
"""Topic of members that have reached the boundary at which they were asked to leave; a report is a
:class:`~moevement_core.rendezvous.drains.Departure`, and after a semicolon its description."""
ELASTIC = "job/elastic"
"""Key of the :class:`~moevement_core.rendezvous.resizing.Grid` of an elastic job."""
BLOCKS = "job/blocks"
"""Key of the sizes of groups of consecutive ranks that communicate in every layer: one or more numbers (``2,8``)."""
STOP = "stop"
"""Key of the reason why the job has ended; the value is empty if all ranks have reached the end of training."""
EXIT_CODE = "exit_code"
"""Key of the exit code of a job that was stopped."""


class NoticedBy(StrEnum):
    """Way in which the coordinator notices that a member is dead."""

    SUPERVISOR = "supervisor"
    """Death that the supervisor reported after it had seen the process end."""
    RESET = "reset"
    """Death assumed because the supervisor's connection broke; usually the supervisor and its processes have ended."""
    LEASE = "lease"
    """Death assumed because the lease ran out: no renewal arrived, or the supervisor found the process stopped."""
    TIMEOUT = "timeout"
    """Death assumed because the process did not leave a generation, or did not acknowledge a roster, in time."""
    RESULT = "result"
    """Removal of a live process because it computed NaN or infinity."""
    DEVICE = "device"
    """Removal of a process because it gave its rank back: it cannot use its device."""
    DRAIN = "drain"
    """Removal of a process because it gave its rank back: the user asked for it (``moevement drain``)."""


@dataclass(frozen=True)
class MemberInfo:
    """Information about a member that the member writes when it joins."""

    member: int
    pid: int
    host: str
    node: str
    """Name of the member's node; all members of a node, and the copies that they keep, fail together."""
    device: int = 0
    """Number of the device that the member was started for, as the member counts its devices."""
    devices: tuple[str, ...] = ()
    """Identities (UUIDs) of the devices that the member sees, in the order of their numbers; empty without a GPU."""

    def encode(self) -> str:
        """Return this object as text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> MemberInfo:
        """Decode a value that :meth:`encode` has returned.

        Raises:
            ExchangeError: the value is not an encoded :class:`MemberInfo`.
        """
        return decoded(text, MemberInfo)


@dataclass(frozen=True)
class UnusableDevice:
    """Notice from a member that cannot use its device any more and is about to end."""

    reason: str
    """Description of the device's fault, for log lines."""
    device: str = ""
    """Identity of the device; empty if the member has none."""
    is_broken: bool = False
    """True if the device is broken, so that other processes cannot use it either."""
    has_computed_wrong: bool = False
    """True if the device works, but an audit has found wrong results of it."""

    def encode(self) -> str:
        """Return this object as text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> UnusableDevice:
        """Decode a value that :meth:`encode` has returned.

        Raises:
            ExchangeError: the value is not an encoded :class:`UnusableDevice`.
        """
        return decoded(text, UnusableDevice)


@dataclass(frozen=True)
class Death:
    """Death of a member."""

    member: int
    rank: int | None
    """Rank of the member; None for a spare."""
    pid: int
    how: str
    """Description of the death, for log lines: ``was killed by signal 9``."""
    at: float
    """Time at which the death was noticed, in seconds since the epoch."""
    noticed_by: str = NoticedBy.SUPERVISOR
    last_seen: float = 0.0
    """Time at which the member was last known to live, in seconds since the epoch."""


def is_drained(death: Death) -> bool:
    """Return True if a death was a planned move (``moevement drain``), and no failure."""
    return death.noticed_by == NoticedBy.DRAIN


@dataclass(frozen=True)
class RosterShard:
    """Entries of a roster for the members of one shard, by rank; see :class:`Roster`."""

    ranks: Mapping[int, int]
    nodes: Mapping[int, str]
    devices: Mapping[int, int]

    def encode(self) -> str:
        """Return this object as text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> RosterShard:
        """Decode a value that :meth:`encode` has returned.

        Raises:
            ExchangeError: the value is not an encoded :class:`RosterShard`.
        """
        return decoded(text, RosterShard)


@dataclass(frozen=True)
class Roster:
    """Roster of a generation: the member for each rank, and the failures since the previous generation.

    The coordinator's roster has entries for all ranks. A member's roster has the entries of its shard only; in elastic
    jobs, it has all entries.
    """

    generation: int
    ranks: Mapping[int, int]
    """Member of each rank."""
    deaths: tuple[Death, ...] = ()
    """Deaths of ranks since a generation last started; empty if ranks restart because of an error without a death."""
    earlier: tuple[Death, ...] = ()
    """Deaths of ranks before those in :attr:`deaths`; a recovery from them has begun, but a failure interrupted it."""
    reasons: tuple[str, ...] = ()
    """Errors that survivors reported when they left the previous generation."""
    formed_at: float = 0.0
    """Time at which this roster was proposed, in seconds since the epoch."""
    first_committed_at: float | None = None
    """Time at which the coordinator heard of the job's first commit, in seconds since the epoch; None before that."""
    left_at: float = 0.0
    """Time at which the last survivor left the previous generation, in seconds since the epoch."""
    ranks_before: int | None = None
    """Number of ranks of the last generation that entered training. None if this roster has the same number of ranks,
    or if no generation has entered training before."""
    spares: int = 0
    """Number of waiting members that have no rank in this roster."""
    starting: int = 0
    """Number of processes that supervisors are starting in place of ended ones; they will be spares."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Node of each rank."""
    devices: Mapping[int, int] = field(default_factory=dict)
    """Number of each rank's device, as the rank's process counts its devices."""
    split: tuple[tuple[int, int], ...] = ()
    """First and last rank of each block (ranks that communicate in every layer) that spans nodes in this roster.

    Blocks are left out if the coordinator has already reported them to the user.
    """
    split_nodes: tuple[tuple[str, ...], ...] = ()
    """Nodes of each block in :attr:`split`, sorted and without duplicates."""
    world: int = 0
    """Number of ranks of the job."""
    placement: str = ""
    """Digest of the node and the device of every rank (:func:`digest_of`)."""

    def rank_of(self, member: int) -> int | None:
        """Return the rank of a member; None if it has none."""
        return next((rank for rank, holder in self.ranks.items() if holder == member), None)

    def divided(self) -> tuple[Roster, dict[int, RosterShard]]:
        """Return this roster without its entries by rank, and the entries by number of the shard."""
        shards: dict[int, RosterShard] = {}
        for rank, member in self.ranks.items():
            shard = shards.setdefault(member // MEMBERS_IN_SHARD, RosterShard({}, {}, {}))
            for entries, own in ((shard.ranks, self.ranks), (shard.nodes, self.nodes), (shard.devices, self.devices)):
                if rank in own:
                    entries[rank] = own[rank]  # type: ignore[index]
        head = replace(self, ranks={}, nodes={}, devices={})
        return head, shards

    def joined(self, shards: Iterable[RosterShard]) -> Roster:
        """Return this roster with the entries of ``shards``."""
        ranks: dict[int, int] = {}
        nodes: dict[int, str] = {}
        devices: dict[int, int] = {}
        for shard in shards:
            ranks.update(shard.ranks)
            nodes.update(shard.nodes)
            devices.update(shard.devices)
        return replace(self, ranks=ranks, nodes=nodes, devices=devices)

    def encode(self) -> str:
        """Return this object as text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> Roster:
        """Decode a value that :meth:`encode` has returned.

        Raises:
            ExchangeError: the value is not an encoded :class:`Roster`.
        """
        return decoded(text, Roster)


def digest_of(nodes: Mapping[int, str], devices: Mapping[int, str]) -> str:
    """Return the digest of a placement, which says on which node and device each rank runs.

    Args:
        nodes: node of each rank.
        devices: identity of each rank's device. A device number is not enough, because each process
            numbers its own devices.
    """
    places = [f"{rank} {node} {devices.get(rank, '')}" for rank, node in sorted(nodes.items())]
    return xxhash.xxh3_64_hexdigest("\n".join(places).encode())


def decoded[T](text: str | bytes, kind: type[T]) -> T:
    """Decode the text of a value.

    Raises:
        ExchangeError: the text is no encoded object of type ``kind``.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ExchangeError(
            f"value of the job is no {kind.__name__}: {error}; all processes need the same version of moevement"
        ) from None
