"""Buffer of one snapshot: host memory in one or several pieces, of which parts may be freed while the rest is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moevement_core.errors import SnapshotError


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Piece of memory, with its offset in its buffer."""

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
        """Bytes from the first to the last, freed parts included."""
        extents = []
        for piece in memory:
            extents.append(Extent(self.nbytes, piece))
            self.nbytes += piece.numel()
        self.extents: Sequence[Extent] = extents
        """Pieces that are not freed, in order."""

    def pieces(self, start: int, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield views of the ``nbytes`` from offset ``start`` on, to read and to write.

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
            raise SnapshotError(f"bytes {at} to {end} of a buffer of {self.nbytes} are not there")

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Return the ``nbytes`` from ``start`` on as one tensor: a view if they are in one piece, else a copy."""
        pieces = list(self.pieces(start, nbytes))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of equal length: a part of ``source``, flat uint8, and the piece that it belongs to."""
    if len(targets) == 1:
        yield source, targets[0]
        return
    at = 0
    for target in targets:
        yield source[at : at + target.numel()], target
        at += target.numel()
