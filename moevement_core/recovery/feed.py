"""Healthy neighbours hand a replaying stage what they sent it the first time, in the same order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moevement_core import damage
from moevement_core.boundary_log import BoundaryLog, Direction
from moevement_core.errors import RecoveryError, SnapshotError
from moevement_core.replication.transport import Transport
from moevement_core.replication.wire import MESSAGE_BYTES, TO_STAGE, Kind, Message, checksum
from moevement_core.snapshot.snapshot import as_bytes, digest_of


def feed(
    rank: int, peer: int, direction: Direction, iterations: Sequence[int], log: BoundaryLog, transport: Transport
) -> int:
    """Send what ``iterations`` sent to ``peer``; on a thread of its own, because the peer asks when it needs it.

    Digests are those of when it was logged, so the peer finds what has been damaged since, here or on the way.

    Returns:
        Payload bytes.
    """
    total = 0
    for iteration in iterations:
        for one in log.sent(iteration, direction) or ():
            payload = as_bytes(one.tensor)
            about = {"order": one.order, "dtype": one.dtype, "shape": one.shape, "digest": one.digest}
            header = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
            said = Message(Kind.TENSOR, rank, iteration, header.numel(), payload.numel(), check=checksum(header))
            for data in (said.encode(), header, payload):
                transport.send(peer, TO_STAGE[direction], data)
            total += payload.numel()
    return total


class Feed:
    """What a replaying rank gets from one healthy neighbour."""

    def __init__(self, peer: int, direction: Direction, transport: Transport) -> None:
        self.received_bytes = 0
        self._peer, self._direction, self._transport = peer, direction, transport
        self._iteration, self._order = -1, 0

    def begin(self, iteration: int) -> None:
        """What is asked for from now on is of ``iteration``."""
        self._iteration, self._order = iteration, 0

    def next(self) -> torch.Tensor:
        """The next tensor of the iteration, on the host.

        Raises:
            RecoveryError: it is not the one that was sent then, or was damaged on the way.
        """
        tag, data = TO_STAGE[self._direction], torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._transport.receive(self._peer, tag, data)
        message = Message.decode(data)
        header = torch.empty(message.header_bytes, dtype=torch.uint8)
        payload = torch.empty(message.payload_bytes, dtype=torch.uint8)
        self._transport.receive(self._peer, tag, header)
        self._transport.receive(self._peer, tag, payload)
        about = self._whole(message, header, payload)
        if (message.kind, message.iteration, about["order"]) != (Kind.TENSOR, self._iteration, self._order):
            raise RecoveryError(
                f"rank {self._peer} fed tensor {about['order']} of iteration {message.iteration}; tensor {self._order} "
                f"of iteration {self._iteration} was wanted"
            )
        self._order += 1
        self.received_bytes += payload.numel()
        return payload.view(getattr(torch, about["dtype"])).view(about["shape"])

    def _whole(self, message: Message, header: torch.Tensor, payload: torch.Tensor) -> dict[str, Any]:
        """What the header says, if neither it nor the payload is damaged."""
        what = f"tensor {self._order} of iteration {message.iteration}, which rank {self._peer} feeds"
        try:
            message.refuse_unless_whole(header)
            about: dict[str, Any] = json.loads(header.numpy().tobytes())
            if digest_of(payload) == about["digest"]:
                return about
        except SnapshotError:
            pass
        damage.report("the checksums of what a neighbour feeds", what, "the recovery begins again")
        raise RecoveryError(
            f"rank {self._peer} fed tensor {self._order} of iteration {message.iteration}, damaged on its way or in "
            "its memory; the recovery begins again"
        )


class Feeds:
    """What a rank that replays gets from healthy neighbours; it sends them nothing."""

    def __init__(self, before: Feed | None, after: Feed | None) -> None:
        self.before, self.after = before, after
        """Of the stage before and of the one after; None where that stage replays too, or there is none."""

    def begin(self, iteration: int) -> None:
        """What is received from now on is of ``iteration``."""
        for feed in (self.before, self.after):
            if feed is not None:
                feed.begin(iteration)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The rank that this one exchanges tensors with on another stage."""

    rank: int
    stage: int


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Of the stage before and the one after; the ends of a pipeline have one, those of a ring both."""

    before: Neighbour | None
    after: Neighbour | None


@dataclass(frozen=True, slots=True)
class Alone:
    """A replay by some stages, while the others feed them and wait."""

    neighbours: Neighbours
    stages: frozenset[int]
    """Those that replay together with this one."""
    transport: Transport | None

    def feeds(self) -> Feeds:
        """From the neighbours that do not replay."""
        before, after = (
            Feed(one.rank, direction, self.transport)
            if one is not None and self.transport is not None and one.stage not in self.stages
            else None
            for one, direction in (
                (self.neighbours.before, Direction.FORWARD),
                (self.neighbours.after, Direction.BACKWARD),
            )
        )
        return Feeds(before, after)
