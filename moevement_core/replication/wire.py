"""Protocol between a rank and a peer that keeps its snapshots: fixed 64-byte messages, then headers and raw bytes.

A snapshot takes a message, a header and an answer. If the answer is GO, the payload and another answer follow. Nothing
is pickled, so a receiver can only refuse foreign bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
import xxhash

from moevement_core.errors import SnapshotError

MESSAGE_BYTES = 64
_MAGIC = b"MoEvmnt2"
_FIELDS = struct.Struct("<8sIIqQQQQ")  # magic, kind, rank, iteration, header bytes, payload bytes, count, check
MAX_HEADER_BYTES = 1 << 30

TO_PEER, TO_SOURCE, TO_OWNER = 1, 2, 3
"""Tags of messages from a source, of answers of its peer, and of snapshots that a holder sends back to their owner."""
TO_STAGE = (4, 5)
"""Tags of tensors that are sent to a stage that replays, forward and backward."""


class Kind(IntEnum):
    """Kind of a message."""

    OPEN = 1
    """Request of a source for ``payload_bytes`` bytes of memory, for all snapshots that are kept at a time."""
    SNAPSHOT = 2
    """Announcement of a source: a snapshot of these sizes follows."""
    DROP = 3
    """Request of a source to drop ``count`` snapshots from ``iteration`` on, which no recovery can use."""
    BYE = 4
    """Last message of a source."""
    TENSOR = 5
    """Announcement of a neighbouring stage: a tensor that crossed a stage boundary follows."""
    GO = 10
    """Answer of a peer: send the payload. If ``payload_bytes`` is not 0, so many flags follow, one for each block, and
    only the flagged blocks are wanted. As an answer to OPEN: the memory is ready."""
    KEPT = 11
    """Answer of a peer: it keeps the snapshot, whose digests match."""
    FULL = 12
    """Answer of a peer: too little memory is free."""
    DAMAGED = 13
    """Answer of a peer: the received bytes do not match their digest or checksum."""
    REFUSED = 14
    """Answer of a peer: the snapshot does not belong here, or needs more memory than the peer may give."""
    STALE = 15
    """Answer of a peer: no rank needs the snapshot, because a newer window is persisted everywhere. The source will
    soon know of that window too."""


@dataclass(frozen=True, slots=True)
class Message:
    """Message of fixed size between two ranks."""

    kind: Kind
    rank: int
    iteration: int = 0
    header_bytes: int = 0
    payload_bytes: int = 0
    count: int = 0
    check: int = 0
    """Checksum of the header or flags that follow, which have no digest of their own. See :func:`checksum`."""

    def encode(self) -> torch.Tensor:
        """Return the message as bytes for the wire, uint8 ``[64]``."""
        fields = _FIELDS.pack(
            _MAGIC, self.kind, self.rank, self.iteration, self.header_bytes, self.payload_bytes, self.count, self.check
        )
        padded = fields.ljust(MESSAGE_BYTES - 8, b"\0")
        return torch.frombuffer(bytearray(padded + xxhash.xxh3_64_digest(padded)), dtype=torch.uint8)

    @staticmethod
    def decode(data: torch.Tensor) -> Message:
        """Return the message that :meth:`encode` made.

        Raises:
            SnapshotError: no sender of this version sends these bytes.
        """
        raw = data.numpy().tobytes()
        if raw[-8:] != xxhash.xxh3_64_digest(raw[:-8]):
            raise SnapshotError("a message whose checksum is wrong; the connection carries something else")
        magic, kind, rank, iteration, header_bytes, payload_bytes, count, check = _FIELDS.unpack_from(raw)
        if magic != _MAGIC or kind not in tuple(Kind) or header_bytes > MAX_HEADER_BYTES:
            raise SnapshotError(f"a message of kind {kind} with magic {magic!r}; the other side is another version")
        return Message(Kind(kind), rank, iteration, header_bytes, payload_bytes, count, check)

    def refuse_unless_whole(self, data: torch.Tensor) -> None:
        """Compare the header or flags that followed this message with its checksum.

        Raises:
            SnapshotError: ``data`` was damaged on its way.
        """
        if checksum(data) != self.check:
            raise SnapshotError(f"the header of iteration {self.iteration} was damaged on its way")


def checksum(data: torch.Tensor) -> int:
    """Return the checksum of a header, or of flags, for :attr:`Message.check`.

    Headers name every tensor and hold the record of an iteration. The digests of tensors cover neither.
    """
    return xxhash.xxh3_64_intdigest(data.numpy())
