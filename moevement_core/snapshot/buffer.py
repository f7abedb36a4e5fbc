"""Host bytes of one snapshot: in one piece or in several, some of which may be given back while the rest is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moevement_core.errors import SnapshotError


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """A piece of memory and where it stands in its buffer."""

    start: int
    memory: torch.Tensor
    """uint8, contiguous."""

    @property
    def end(self) -> int:
        """The first byte of the buffer after it."""
        return self.start + self.memory.numel()


class Buffer:
    """Bytes that are addressed as if they were in one piece.

    Args:
        memory: the pieces, uint8, in order.
    """

    def __init__(self, *memory: torch.Tensor) -> None:
        self.nbytes = 0
        """From the first byte to the last, given back or not."""
        extents = []
        for piece in memory:
            extents.append(Extent(self.nbytes, piece))
            self.nbytes += piece.numel()
        self.extents: Sequence[Extent] = extents
        """What of it is there, in order."""

    def pieces(self, start: int, nbytes: int) -> Iterator[torch.Tensor]:
        """``nbytes`` from ``start`` on, where they are: views to read and to write.

        Raises:
            SnapshotError: some of them were given back, or never were.
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
        """The same in one piece: a view where it is in one, else a copy."""
        pieces = list(self.pieces(start, nbytes))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal length: parts of ``source``, flat uint8, and the pieces that they go to."""
    if len(targets) == 1:
        yield source, targets[0]
        return
    at = 0
    for target in targets:
        yield source[at : at + target.numel()], target
        at += target.numel()
