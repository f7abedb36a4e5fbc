"""Buffer of one snapshot: host memory in one or several pieces, of which some may be freed before the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moevement_core.errors import SnapshotError


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Piece of a buffer's memory, with the offset of the piece in the buffer."""

    start: int
    memory: torch.Tensor
    """Memory of the piece: uint8, contiguous."""

    @property
    def end(self) -> int:
        """Offset of the first byte after the piece."""
        return self.start + self.memory.numel()


class Buffer:
    """Host memory that is addressed as if it were in one piece.

    Args:
        memory: pieces of the buffer, uint8, in order.
    """

    def __init__(self, *memory: torch.Tensor) -> None:
        self.nbytes = 0
        """Bytes of the buffer, freed parts included."""
        extents = []
        for piece in memory:
            extents.append(Extent(self.nbytes, piece))
            self.nbytes += piece.numel()
        self.extents: Sequence[Extent] = extents
        """Pieces that are not freed, in order."""

    def pieces(self, start: int, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield writable views of the ``nbytes`` bytes from offset ``start`` on.

        Raises:
            SnapshotError: some of these bytes are freed or outside the buffer.
        """
        at, end = start, start + nbytes
        for extent in self.extents:
            if extent.end <= at or at == end:
                continue
            if extent.start > at:
                break
            upto = min(end, extent.end)
            yield extent.memory[at - extent.start : upto - extent.start]
            at = upto
        if at < end:
            raise SnapshotError(f"bytes {at} to {end} are freed or outside the buffer, which has {self.nbytes} bytes")

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` bytes from offset ``start`` on as one tensor: a view of one piece, or a copy of several."""
        pieces = list(self.pieces(start, nbytes))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split ``source`` (flat uint8) into parts as long as the ``targets``; yield each part with its target."""
    if len(targets) == 1:
        yield source, targets[0]
        return
    at = 0
    for target in targets:
        yield source[at : at + target.numel()], target
        at += target.numel()
