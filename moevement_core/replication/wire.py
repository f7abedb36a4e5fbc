"""Protocol between a source (a rank that sends its snapshots) and a peer that keeps copies of them.

Messages have a fixed size of 64 bytes; headers and payloads follow as raw bytes. For each snapshot the source sends a
message and a header, and the peer answers. If the answer is GO, the source sends the payload, and the peer answers a
second time. Nothing is pickled, so bytes from a foreign process cannot execute code. The receiver refuses such bytes.
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
"""Tags: from a source to its peer, from the peer to the source, and in a recovery to a rank that fetches snapshots."""
TO_STAGE = (4, 5)
"""Tags of logged tensors for a stage that replays: forward tensors (activations), and backward tensors (gradients)."""


class MessageKind(IntEnum):
    """Kind of a message."""

    OPEN = 1
    """Request of a source: the peer is to set aside ``payload_bytes`` bytes in all for the source's snapshots."""
    SNAPSHOT = 2
    """Announcement of a source: a snapshot with ``header_bytes`` and ``payload_bytes`` follows."""
    DROP = 3
    """Request of a source to drop ``count`` snapshots from ``iteration`` on, which no recovery can use."""
    BYE = 4
    """Last message of a source."""
    TENSOR = 5
    """Announcement of a neighbouring stage: a tensor that crossed a stage boundary follows."""
    HANDOVER = 6
    """Announcement of a source that leaves its rank: its whole state follows, with ``header_bytes`` and
    ``payload_bytes``, for the process that takes the rank over. The peer answers as after SNAPSHOT."""
    GO = 10
    """Answer of a peer. After OPEN: the memory is ready. After SNAPSHOT: the source may send the payload.

    If ``payload_bytes`` is not 0, that number of flags follows, one for each block of the snapshot. The source then
    sends only the blocks whose flag is set.
    """
    KEPT = 11
    """Answer of a peer: all digests match, and the peer keeps the snapshot."""
    FULL = 12
    """Answer of a peer: too little memory is free."""
    DAMAGED = 13
    """Answer of a peer: the received bytes do not match their digest or checksum."""
    REFUSED = 14
    """Answer of a peer: it may not give the requested memory, or the header is not the announced one. In a recovery: it
    does not have the snapshot that a rank wants to fetch."""
    STALE = 15
    """Answer of a peer: no rank needs the snapshot, because a newer window is persisted on every rank.

    The source does not know of that window yet, but learns of it within an iteration.
    """


@dataclass(frozen=True, slots=True)
class Message:
    """Message of fixed size between two ranks."""

    kind: MessageKind
    rank: int
    iteration: int = 0
    header_bytes: int = 0
    payload_bytes: int = 0
    count: int = 0
    check: int = 0
    """Checksum of the header or of the flags that follow this message, as :func:`checksum` computes it."""

    def encode(self) -> torch.Tensor:
        """Return the message as bytes for the wire, uint8 ``[64]``."""
        fields = _FIELDS.pack(
            _MAGIC, self.kind, self.rank, self.iteration, self.header_bytes, self.payload_bytes, self.count, self.check
        )
        padded = fields.ljust(MESSAGE_BYTES - 8, b"\0")
        return torch.frombuffer(bytearray(padded + xxhash.xxh3_64_digest(padded)), dtype=torch.uint8)

    @staticmethod
    def decode(data: torch.Tensor) -> Message:
        """Return the message from the bytes that :meth:`encode` returned.

        Raises:
            SnapshotError: ``data`` is damaged, or is not a message of this version of the protocol.
        """
        raw = data.numpy().tobytes()
        if raw[-8:] != xxhash.xxh3_64_digest(raw[:-8]):
            raise SnapshotError("a message has a wrong checksum; it was damaged, or it is not a message of moevement")
        magic, kind, rank, iteration, header_bytes, payload_bytes, count, check = _FIELDS.unpack_from(raw)
        if magic != _MAGIC or kind not in tuple(MessageKind) or header_bytes > MAX_HEADER_BYTES:
            raise SnapshotError(
                f"a message has kind {kind} and magic {magic!r}; all ranks need the same version of moevement"
            )
        return Message(
            kind=MessageKind(kind),
            rank=rank,
            iteration=iteration,
            header_bytes=header_bytes,
            payload_bytes=payload_bytes,
            count=count,
            check=check,
        )

    def refuse_unless_whole(self, data: torch.Tensor) -> None:
        """Compare the header or flags that followed this message with the checksum in the message.

        Raises:
            SnapshotError: ``data`` was damaged on the way.
        """
        if checksum(data) != self.check:
            raise SnapshotError(f"the header or flags of iteration {self.iteration} were damaged on the way")


def checksum(data: torch.Tensor) -> int:
    """Return the checksum of a header, or of flags, for :attr:`Message.check`.

    A header needs its own checksum: it has the names of tensors and the boundary record, which no digest of a tensor
    covers.
    """
    return xxhash.xxh3_64_intdigest(data.numpy())
