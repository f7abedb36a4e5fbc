"""Gather what a snapshot takes of an operator into one buffer, so that one copy brings it to the host.

Each piece (a range of elements of some tensor) is cast where the precision regime says so, and digested as it will lie
in the buffer. The digest of a piece is the sum, modulo 2^64, of a mixed 64-bit word for each element: its bits and its
place. A sum has no order, so blocks of a GPU can make it, and any change of a bit, a place or a length shows. It guards
against damage, not against malice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moevement_kernels.backend import has_kernels

ALIGNMENT = 256
"""Pieces begin at multiples of so many bytes."""
CHUNK = 4096
"""Elements of one program."""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
CASTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Piece:
    """A contiguous tensor, and the dtype that it is to have in the buffer."""

    source: torch.Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not self.source.is_contiguous():
            raise ValueError(f"a piece of {tuple(self.source.shape)} is not contiguous; give a contiguous one")
        if self.dtype.itemsize not in _WORDS or (self.source.dtype != self.dtype and not self._can_cast()):
            raise ValueError(
                f"a piece of {self.source.dtype} as {self.dtype}; needs the same, of up to 4 bytes, or two of {CASTS}"
            )

    def _can_cast(self) -> bool:
        return self.source.dtype in CASTS and self.dtype in CASTS

    @property
    def nbytes(self) -> int:
        """In the buffer."""
        return self.source.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Packed:
    """One buffer."""

    buffer: torch.Tensor
    """uint8, on the pieces' device; what no piece covers is 0."""
    begins: tuple[int, ...]
    """The first byte of each piece."""
    digests: torch.Tensor
    """int64 ``[pieces]``, on the device; the bits of unsigned sums."""


def layout(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], int]:
    """Where each piece begins in the buffer, and the buffer's bytes."""
    begins, end = [], 0
    for piece in pieces:
        begins.append(end)
        end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(begins), end


def digest_reference(values: torch.Tensor) -> int:
    """Of the elements of a tensor, as they lie in memory; 0 to 2^64 - 1."""
    flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().view(_WORDS[values.element_size()])
    with np.errstate(over="ignore"):
        words = flat.astype(np.uint64) ^ (np.arange(1, flat.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((words ^ (words >> np.uint64(31))).sum(dtype=np.uint64))


def reference(pieces: Sequence[Piece]) -> Packed:
    """One after the other."""
    begins, size = layout(pieces)
    buffer = torch.zeros(size, dtype=torch.uint8, device=_device(pieces))
    digests = []
    for piece, begin in zip(pieces, begins, strict=True):
        cast = piece.source.detach().to(piece.dtype)
        buffer[begin : begin + piece.nbytes] = cast.view(-1).view(torch.uint8)
        digests.append(digest_reference(cast))
    signed = np.array(digests, dtype=np.uint64).view(np.int64)
    return Packed(buffer, begins, torch.from_numpy(signed).to(buffer.device))


def pack(pieces: Sequence[Piece], into: torch.Tensor | None = None) -> Packed:
    """As :func:`reference`, in a launch for each pair of dtypes and without waiting for the device.

    Args:
        pieces: on one device.
        into: uint8, at least as many bytes as :func:`layout` says; made anew if not given. Only what pieces cover is
            written.

    Raises:
        ValueError: ``into`` is too small.
    """
    begins, size = layout(pieces)
    device = _device(pieces)
    if into is not None and (into.dtype != torch.uint8 or into.numel() < size):
        raise ValueError(f"a buffer of {into.numel()} {into.dtype}; needs {size} bytes (uint8)")
    if into is not None and (into.data_ptr() % 16 or into.device != device):
        raise ValueError(f"a buffer at {into.data_ptr():#x} on {into.device}; needs a multiple of 16 on {device}")
    if not has_kernels(pieces[0].source):
        made = reference(pieces)
        if into is None:
            return made
        into[:size] = made.buffer
        return Packed(into[:size], begins, made.digests)
    buffer = torch.zeros(size, dtype=torch.uint8, device=device) if into is None else into[:size]
    digests = torch.zeros(len(pieces), dtype=torch.int64, device=device)
    kinds = sorted({(piece.source.dtype, piece.dtype) for piece in pieces}, key=str)
    for source, dtype in kinds:
        chosen = [index for index, piece in enumerate(pieces) if (piece.source.dtype, piece.dtype) == (source, dtype)]
        _launch(pieces, begins, chosen, buffer, digests)
    return Packed(buffer, begins, digests)


def _launch(
    pieces: Sequence[Piece], begins: Sequence[int], chosen: Sequence[int], buffer: torch.Tensor, digests: torch.Tensor
) -> None:
    from moevement_kernels.triton_pack import pack_kernel, triton_dtype

    table = _chunks(pieces, begins, chosen)
    if not table.shape[1]:
        return
    address, target, place, left, piece = torch.from_numpy(table).to(buffer.device, non_blocking=True)
    sums = torch.empty(table.shape[1], dtype=torch.int64, device=buffer.device)
    source, dtype = pieces[chosen[0]].source.dtype, pieces[chosen[0]].dtype
    pack_kernel[(table.shape[1],)](
        address, buffer, target, place, left, sums, SOURCE=triton_dtype(source), TARGET=triton_dtype(dtype),
        ITEM=dtype.itemsize, CHUNK=CHUNK,
    )  # fmt: skip
    digests.index_add_(0, piece, sums)


def _chunks(pieces: Sequence[Piece], begins: Sequence[int], chosen: Sequence[int]) -> np.ndarray:
    """For each program: where its elements are, where they go, their place in the piece, how many, whose."""
    columns = []
    for index in chosen:
        piece = pieces[index]
        first = np.arange(0, piece.source.numel(), CHUNK, dtype=np.int64)
        columns.append(
            np.stack(
                [
                    piece.source.data_ptr() + first * piece.source.element_size(),
                    begins[index] + first * piece.dtype.itemsize,
                    first,
                    np.minimum(piece.source.numel() - first, CHUNK),
                    np.full_like(first, index),
                ]
            )
        )
    return np.concatenate(columns, axis=1)


def _device(pieces: Sequence[Piece]) -> torch.device:
    if not pieces:
        raise ValueError("no pieces: needs one at least")
    return pieces[0].source.device
