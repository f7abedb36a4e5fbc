"""Flips of bits for rehearsals of damage (``--moevement-inject-flip``), in data that has a digest and is not used yet.

A bit of stored data flips after ranks have planned a recovery, and before they read the data. So the recovery is sure
to read the damaged data. A bit of sent data flips on the way. A flip changes the real bytes of a snapshot, a parity
block, a boundary log, a file or a message. The code that reads the data does not know about flips.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import override

import torch

from moevement_core import log
from moevement_core.comms.transport import Transport
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.boundary_log import BoundaryLog, Direction
from moevement_core.recovery.holdings import Fetch, Source
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.recovery.sources import SnapshotSource
from moevement_core.rendezvous.value_client import is_first_to_claim
from moevement_core.replication.wire import MESSAGE_BYTES, Message, MessageKind
from moevement_core.restart.faults import Flip, FlipKind
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import Entry, Header, Snapshot
from moevement_core.storage.files import payload_start

_FLIPPED = "flipped/{}"
PREFIX = "flipped a bit: "
"""Beginning of the log line that reports a flipped bit; a :class:`FlipPlace` as JSON follows."""
_SOURCES = {
    FlipKind.COPIES: (Source.PEER,),
    FlipKind.OWN: (Source.MEMORY,),
    FlipKind.GRADIENTS: (Source.MEMORY, Source.PEER),
    FlipKind.WINDOWS: (Source.FILE,),
}
_ON_THE_WIRE = {
    "snapshots": (FlipKind.WIRE, FlipKind.HEADERS, FlipKind.MESSAGES),
    "fetches": (FlipKind.FETCHES,),
    "feeds": (FlipKind.FEEDS,),
}
"""Kinds of flips by channel; the kind that flips payloads comes first."""


@dataclass(frozen=True)
class FlipPlace:
    """Position of a flipped bit."""

    kind: str
    rank: int
    """Rank in whose memory or folder the bit is, or that sent the bit."""
    owner: int
    """Rank that captured the snapshot or logged the tensor; for a block of parity, the first member of its group."""
    iteration: int
    what: str
    byte: int
    """Offset of the byte within the data that ``what`` names."""
    bit: int


class _Flipper:
    """Injector of the flips of this process."""

    def __init__(self, flips: Sequence[Flip]) -> None:
        self.flips = flips
        self._left = list(enumerate(flips))

    def due(self, kinds: Sequence[FlipKind], rank: int, iteration: int) -> Iterator[tuple[int, Flip]]:
        """Yield index and flip for each unclaimed flip of ``kinds`` that is due on ``rank`` at ``iteration``."""
        for number, flip in list(self._left):
            if flip.kind in kinds and flip.rank in (None, rank) and flip.iteration <= iteration:
                yield number, flip

    def takes(self, number: int) -> bool:
        """Claim a flip for this process; return False if another process has claimed it."""
        self._left = [(claimed, flip) for claimed, flip in self._left if claimed != number]
        return is_first_to_claim(_FLIPPED.format(number))


_flipper = _Flipper(())


def begin(flips: Sequence[Flip]) -> None:
    """Arm ``flips`` in this process; do nothing if the same flips are armed already."""
    global _flipper
    if flips != _flipper.flips:
        _flipper = _Flipper(flips)


def at_plans(rank: int, plans: Sequence[RecoveryPlan], sources: Mapping[Source, SnapshotSource]) -> None:
    """Flip bits in data that a planned fetch is about to read on this rank. Called before the fetches."""
    until = max(plan.until for plan in plans)
    for number, flip in _flipper.due((*_SOURCES, FlipKind.PARITY), rank, until):
        draw = random.Random(flip.seed)
        fetches = [fetch for plan in plans for fetch in plan.fetches]
        draw.shuffle(fetches)
        find = _of_parity if flip.kind is FlipKind.PARITY else _of_fetch
        for fetch in fetches:
            if (position := find(rank, fetch, flip, sources, draw)) is not None:
                if _flipper.takes(number):
                    _flip(*position)
                break


def _of_fetch(
    rank: int, fetch: Fetch, flip: Flip, sources: Mapping[Source, SnapshotSource], draw: random.Random
) -> tuple[torch.Tensor, FlipPlace] | None:
    if fetch.holder != rank or fetch.sum is not None or fetch.source not in _SOURCES[flip.kind]:
        return None
    snapshot = sources[fetch.source].open(fetch.source, fetch.owner, fetch.iteration)
    if snapshot is None or (entry := _entry(snapshot, flip.kind, draw)) is None:
        return None
    buffer, offset, at = snapshot.buffer, entry.offset, draw.randrange(entry.nbytes)
    if (path := sources[fetch.source].path_of(fetch.owner, fetch.iteration)) is not None:
        memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        buffer, offset = Buffer(memory), offset + payload_start(path)
    place = FlipPlace(
        kind=flip.kind,
        rank=rank,
        owner=fetch.owner,
        iteration=fetch.iteration,
        what=entry.name,
        byte=at,
        bit=draw.randrange(8),
    )
    return _byte(buffer, offset + at), place


def _entry(snapshot: Snapshot, kind: FlipKind, draw: random.Random) -> Entry | None:
    is_gradient = kind is FlipKind.GRADIENTS
    entries = [
        fetch
        for fetch in snapshot.header.entries
        if fetch.nbytes and (not is_gradient or fetch.saved is Saved.GRADIENT)
    ]
    return draw.choice(entries) if entries else None


def _of_parity(
    rank: int, fetch: Fetch, flip: Flip, sources: Mapping[Source, SnapshotSource], draw: random.Random
) -> tuple[torch.Tensor, FlipPlace] | None:
    terms = fetch.sum.terms if fetch.sum is not None else ()
    for term in terms:
        if term.rank != rank or term.source is not Source.PARITY:
            continue
        if (opened := sources[Source.PARITY].open_sum(term.owner, fetch.iteration)) is None:
            continue
        group, stripe = opened
        group.end_reading(stripe)
        at = draw.randrange(stripe.total.nbytes)
        return _byte(stripe.total, at), FlipPlace(
            kind=flip.kind, rank=rank, owner=term.owner, iteration=fetch.iteration,
            what=f"the sum of its group, for rank {fetch.owner}", byte=at, bit=draw.randrange(8),
        )  # fmt: skip
    return None


def at_log(rank: int, boundary_log: BoundaryLog) -> None:
    """Flip bits in a boundary log. Called before the log is checked and fed."""
    iterations = boundary_log.iterations
    for number, flip in _flipper.due((FlipKind.LOGS,), rank, max(iterations, default=-1)):
        draw = random.Random(flip.seed)
        iteration = iterations[-1]
        sent = [
            (direction, logged)
            for direction in Direction
            for logged in boundary_log.sent(iteration, direction) or ()
            if logged.buffer.numel()
        ]
        if not sent or not _flipper.takes(number):
            continue
        direction, logged = draw.choice(sent)
        _ = logged.digest  # Wait until the thread has made the digest of the undamaged tensor.
        at = draw.randrange(logged.buffer.numel())
        what = f"tensor {logged.order} that was sent {direction.name.lower()}"
        _flip(
            _byte(Buffer(logged.buffer), at),
            FlipPlace(
                kind=flip.kind, rank=rank, owner=rank, iteration=iteration, what=what, byte=at, bit=draw.randrange(8)
            ),
        )


def flipping_transport(channel: str, inner: Transport) -> Transport:
    """Return ``inner``, wrapped in a transport that flips bits if flips of this channel are armed.

    Args:
        channel: ``snapshots``, ``fetches`` or ``feeds``.
        inner: transport that sends and receives.
    """
    kinds = _ON_THE_WIRE[channel]
    return _Flipping(inner, kinds) if any(flip.kind in kinds for flip in _flipper.flips) else inner


@dataclass(slots=True)
class _Announced:
    """Message that has announced a payload to a peer; the payload is still to come."""

    message: Message
    header: torch.Tensor | None = None
    """Header of the payload, once it has been sent."""

    def covered(self, payload: torch.Tensor, draw: random.Random) -> tuple[str, int]:
        """Choose a random byte of ``payload`` that a digest covers, so never a byte of padding between tensors.

        Args:
            payload: first piece of the payload that is sent.
            draw: source of randomness.

        Returns:
            Name of the tensor that the byte belongs to, and offset of the byte in ``payload``.
        """
        if self.message.kind is not MessageKind.SNAPSHOT or self.header is None:
            return f"tensor of iteration {self.message.iteration}", draw.randrange(payload.numel())
        entries = [entry_ for entry_ in Header.decode(self.header.numpy().tobytes()).entries if entry_.nbytes]
        inside = [entry_ for entry_ in entries if entry_.offset + entry_.nbytes <= payload.numel()]
        entry = draw.choice(inside) if inside else min(entries, key=lambda entry_: entry_.offset)
        last = min(entry.offset + entry.nbytes, payload.numel())
        return entry.name, draw.randrange(entry.offset, last)


class _Flipping(Transport):
    """Transport that sends data unchanged, except for the flips that are due."""

    def __init__(self, inner: Transport, kinds: Sequence[FlipKind]) -> None:
        self._inner, self._kinds = inner, kinds
        self._announced: dict[tuple[int, int], _Announced] = {}

    @override
    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        self._inner.receive(peer, tag, data)

    @override
    def pace(self, peer: int, tag: int, bytes_per_s: float) -> None:
        self._inner.pace(peer, tag, bytes_per_s)

    @property
    @override
    def parallel_bytes(self) -> int:
        return self._inner.parallel_bytes

    @override
    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        self._inner.send(peer, tag, self._maybe_flipped(peer, tag, data))

    def _maybe_flipped(self, peer: int, tag: int, data: torch.Tensor) -> torch.Tensor:
        if (message := _message(data)) is not None:
            self._announced.pop((peer, tag), None)
            if message.kind in (MessageKind.SNAPSHOT, MessageKind.TENSOR):
                self._announced[peer, tag] = _Announced(message)
                return self._flipped(peer, data, self._announced[peer, tag], FlipKind.MESSAGES)
            return data
        if (about := self._announced.get((peer, tag))) is None or not data.numel():
            return data
        if about.header is None:
            about.header = data
            return self._flipped(peer, data, about, FlipKind.HEADERS)
        del self._announced[peer, tag]  # The rest of the payload is sent unchanged.
        return self._flipped(peer, data, about, self._kinds[0])

    def _flipped(self, peer: int, data: torch.Tensor, about: _Announced, kind: FlipKind) -> torch.Tensor:
        message, rank = about.message, int(os.environ["RANK"])
        for number, flip in _flipper.due([kind] if kind in self._kinds else [], rank, message.iteration):
            if not _flipper.takes(number):
                continue
            draw, data = random.Random(flip.seed), data.clone()
            if kind in (FlipKind.HEADERS, FlipKind.MESSAGES):
                what, at = kind.removesuffix("s"), draw.randrange(data.numel())
            else:
                what, at = about.covered(data, draw)
            where = f"{what}, on its way to rank {peer}"
            _flip(
                data[at : at + 1],
                FlipPlace(
                    kind,
                    rank,
                    owner=message.rank,
                    iteration=message.iteration,
                    what=where,
                    byte=at,
                    bit=draw.randrange(8),
                ),
            )
        return data


def _message(data: torch.Tensor) -> Message | None:
    if data.numel() != MESSAGE_BYTES:
        return None
    try:
        return Message.decode(data)
    except Exception:
        return None


def _byte(buffer: Buffer, at: int) -> torch.Tensor:
    (piece,) = buffer.pieces(at, 1)
    return piece


def _flip(byte: torch.Tensor, place: FlipPlace) -> None:
    byte ^= 1 << place.bit
    log.info(PREFIX + json.dumps(asdict(place)))
