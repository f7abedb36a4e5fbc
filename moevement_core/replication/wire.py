"""Protocol between a rank and a peer that keeps its snapshots: fixed 64-byte messages, then headers and raw bytes.

For each snapshot: message, header, answer; and if the answer is GO, the payload and another answer. No pickle: a
stranger's bytes can at worst be refused.
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
"""Tags: what a source sends, what its peer answers, and what anybody sends back to whom it belongs."""
TO_STAGE = (4, 5)
"""Tags of what a stage that replays is fed, forward and backward."""


class Kind(IntEnum):
    """Kinds of messages between source and peer."""

    OPEN = 1
    """Source: make ready ``payload_bytes`` for all that is kept at a time."""
    SNAPSHOT = 2
    """Source: a snapshot of these sizes follows."""
    DROP = 3
    """Source: forget ``count`` snapshots from ``iteration`` on; no recovery can use them."""
    BYE = 4
    """Source: nothing follows."""
    TENSOR = 5
    """Neighbour: a tensor that crossed a stage boundary follows."""
    GO = 10
    """Peer: send the payload, of ``payload_bytes`` blocks those that the flags say which follow, all of it if there are
    none; or, to OPEN, ready."""
    KEPT = 11
    """Peer: it is here, and it is what was captured."""
    FULL = 12
    """Peer: no buffer is free."""
    DAMAGED = 13
    """Peer: the bytes are not those that the header says."""
    REFUSED = 14
    """Peer: not a snapshot that belongs here, or more memory than it may give."""
    STALE = 15
    """Peer: a newer window is persisted everywhere, as the source learns in a moment; nobody needs this any more."""


@dataclass(frozen=True, slots=True)
class Message:
    """Message of the protocol."""

    kind: Kind
    rank: int
    iteration: int = 0
    header_bytes: int = 0
    payload_bytes: int = 0
    count: int = 0
    check: int = 0
    """Checksum of what follows and has no digest of its own: a header, or flags. See :func:`checksum`."""

    def encode(self) -> torch.Tensor:
        """Return the message as it travels, uint8 ``[64]``."""
        fields = _FIELDS.pack(
            _MAGIC, self.kind, self.rank, self.iteration, self.header_bytes, self.payload_bytes, self.count, self.check
        )
        padded = fields.ljust(MESSAGE_BYTES - 8, b"\0")
        return torch.frombuffer(bytearray(padded + xxhash.xxh3_64_digest(padded)), dtype=torch.uint8)

    @staticmethod
    def decode(data: torch.Tensor) -> Message:
        """The inverse of :meth:`encode`.

        Raises:
            SnapshotError: bytes that no sender of this version sends.
        """
        raw = data.numpy().tobytes()
        if raw[-8:] != xxhash.xxh3_64_digest(raw[:-8]):
            raise SnapshotError("a message whose checksum is wrong; the connection carries something else")
        magic, kind, rank, iteration, header_bytes, payload_bytes, count, check = _FIELDS.unpack_from(raw)
        if magic != _MAGIC or kind not in tuple(Kind) or header_bytes > MAX_HEADER_BYTES:
            raise SnapshotError(f"a message of kind {kind} with magic {magic!r}; the other side is another version")
        return Message(Kind(kind), rank, iteration, header_bytes, payload_bytes, count, check)

    def refuse_unless_whole(self, data: torch.Tensor) -> None:
        """Compare what followed this message with its checksum.

        Raises:
            SnapshotError: it was damaged on its way.
        """
        if checksum(data) != self.check:
            raise SnapshotError(f"the header of iteration {self.iteration} was damaged on its way")


def checksum(data: torch.Tensor) -> int:
    """Return the checksum of a header, or of flags, for :attr:`Message.check`.

    Headers name every tensor, and hold the record of an iteration; digests of tensors say nothing of either.
    """
    return xxhash.xxh3_64_intdigest(data.numpy())
