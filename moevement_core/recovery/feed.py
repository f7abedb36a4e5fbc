"""Feeds of a replaying stage: healthy neighbours send the logged tensors of the first execution again, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moevement_core.comms.transport import Transport
from moevement_core.errors import RecoveryError, SnapshotError
from moevement_core.recovery.boundary_log import BoundaryLog, Direction
from moevement_core.replication.wire import MESSAGE_BYTES, TO_STAGE, Message, MessageKind, checksum
from moevement_core.snapshot.snapshot import as_bytes, digest_of
from moevement_core.util import damage


def feed(
    rank: int, peer: int, direction: Direction, iterations: Sequence[int], log: BoundaryLog, transport: Transport
) -> int:
    """Send ``peer`` the logged tensors of ``iterations``; called on a separate thread, because sends wait for the peer.

    With each tensor, the function sends the digest made when the tensor was logged. So the peer detects damage that
    happened since then, in this rank's memory or on the way.

    Returns:
        Number of payload bytes that were sent.
    """
    total = 0
    for iteration in iterations:
        for logged in log.sent(iteration, direction) or ():
            payload = as_bytes(logged.tensor)
            about = {"order": logged.order, "dtype": logged.dtype, "shape": logged.shape, "digest": logged.digest}
            header = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
            message = Message(
                kind=MessageKind.TENSOR,
                rank=rank,
                iteration=iteration,
                header_bytes=header.numel(),
                payload_bytes=payload.numel(),
                check=checksum(header),
            )
            for data in (message.encode(), header, payload):
                transport.send(peer, TO_STAGE[direction], data)
            total += payload.numel()
    return total


class Feed:
    """Tensors that a replaying rank receives from one healthy neighbour, in order."""

    def __init__(self, peer: int, direction: Direction, transport: Transport) -> None:
        self._peer, self._direction, self._transport = peer, direction, transport
        self._iteration, self._order = -1, 0

    def begin(self, iteration: int) -> None:
        """Begin to receive the tensors of ``iteration``."""
        self._iteration, self._order = iteration, 0

    def next(self) -> torch.Tensor:
        """Receive the next tensor of the iteration and return it, on the host.

        Raises:
            RecoveryError: the neighbour sent a tensor that was not expected next, or the tensor is damaged.
        """
        tag, data = TO_STAGE[self._direction], torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        self._transport.receive(self._peer, tag, data)
        message = Message.decode(data)
        header = torch.empty(message.header_bytes, dtype=torch.uint8)
        payload = torch.empty(message.payload_bytes, dtype=torch.uint8)
        self._transport.receive(self._peer, tag, header)
        self._transport.receive(self._peer, tag, payload)
        about = self._whole(message, header, payload)
        if (message.kind, message.iteration, about["order"]) != (MessageKind.TENSOR, self._iteration, self._order):
            raise RecoveryError(
                f"rank {self._peer} fed tensor {about['order']} of iteration {message.iteration}; tensor {self._order} "
                f"of iteration {self._iteration} was expected"
            )
        self._order += 1
        return payload.view(getattr(torch, about["dtype"])).view(about["shape"])

    def _whole(self, message: Message, header: torch.Tensor, payload: torch.Tensor) -> dict[str, Any]:
        """Check a received tensor (``payload``) and its ``header``, and return the decoded header.

        Raises:
            RecoveryError: the header or the payload is damaged.
        """
        what = f"tensor {self._order} of iteration {message.iteration}, which rank {self._peer} feeds"
        try:
            message.refuse_unless_whole(header)
            about: dict[str, Any] = json.loads(header.numpy().tobytes())
            if digest_of(payload) == about["digest"]:
                return about
        except SnapshotError:
            pass
        damage.report("the checksums of fed tensors", what, "the recovery begins again")
        raise RecoveryError(
            f"rank {self._peer} fed tensor {self._order} of iteration {message.iteration}, but the tensor was damaged "
            "in that rank's memory or on the way; the recovery begins again"
        )


class Feeds:
    """Tensors that a replaying rank receives from its healthy neighbours. The rank sends nothing to them."""

    def __init__(self, before: Feed | None, after: Feed | None) -> None:
        self.before, self.after = before, after
        """Feeds of the previous and of the next stage; None if that stage replays too, or does not exist."""

    def begin(self, iteration: int) -> None:
        """Begin to receive the tensors of ``iteration`` from each neighbour that feeds this rank."""
        for feed in (self.before, self.after):
            if feed is not None:
                feed.begin(iteration)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Rank of another stage with which this rank exchanges tensors."""

    rank: int
    stage: int


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours of a rank on the previous and the next stage; None at the ends of a pipeline that is not a ring."""

    before: Neighbour | None
    after: Neighbour | None


@dataclass(frozen=True, slots=True)
class Feeding:
    """Description of who feeds a replaying rank: its neighbours, the channel to them, and the stages that replay."""

    neighbours: Neighbours
    stages: frozenset[int]
    """Stages that replay together, this rank's stage included."""
    transport: Transport | None

    def feeds(self) -> Feeds:
        """Return the feeds from the neighbours that do not replay."""
        before, after = (
            Feed(neighbour.rank, direction, self.transport)
            if neighbour is not None and self.transport is not None and neighbour.stage not in self.stages
            else None
            for neighbour, direction in (
                (self.neighbours.before, Direction.FORWARD),
                (self.neighbours.after, Direction.BACKWARD),
            )
        )
        return Feeds(before, after)
