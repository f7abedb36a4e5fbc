"""Tiles of rows. One program of a grouped kernel processes one tile.

The tokens of an expert are contiguous rows. The rows are cut into tiles of BM rows from the expert's first row on, so a
tile has rows of only one expert. Results of a tile therefore do not depend on other experts, and a pass with some
frozen experts gives the same bits as one with only active experts.

Example: two experts have 5 and 3 tokens, and BM is 4. There are three tiles: ``begin`` is 0, 4, 5 and ``end`` 5, 5, 8.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TABLES = 2048
"""Largest number of cached tables of each kind. A table has a few KB of device memory.

Addresses of weights are needed during a whole training run. Tables of token counts are needed from the forward pass of
a micro-batch to the backward pass of the same micro-batch.
"""


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program's work: rows, columns, and elements of the inner dimension per step."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3


def tiles_of(dtype: torch.dtype, *, two_products: bool = False) -> Tiles:
    """Return sizes that fit into shared memory and registers.

    The sizes depend only on the arguments, so sums have the same order in every run.

    Args:
        dtype: dtype of the tokens.
        two_products: True if a program computes two products, as for both halves of a gated expert's first weight.
    """
    if dtype == torch.float32:
        return Tiles(columns=32 if two_products else 64, inner=32)
    return Tiles(columns=64 if two_products else 128)


@dataclass(frozen=True)
class RowTiles:
    """Tiles of all experts on the device, int32 ``[tiles]`` each."""

    expert: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    """End of the expert's rows, exclusive; a tile may end before it."""

    @property
    def count(self) -> int:
        """Number of tiles of all experts."""
        return self.expert.numel()


def row_tiles(counts: Sequence[int], rows: int, device: torch.device) -> RowTiles:
    """Return the tiles of ``rows`` rows for ``counts`` tokens of each expert. Experts without tokens have no tiles.

    A forward pass, its recomputation and its backward pass share one table, which is copied to the device once.

    Raises:
        ValueError: a count is negative, or there are 2^31 tokens or more.
    """
    return _row_tiles(tuple(counts), rows, device, _stream(device))


@functools.lru_cache(maxsize=TABLES)
def _row_tiles(counts: tuple[int, ...], rows: int, device: torch.device, stream: int) -> RowTiles:
    tokens = np.asarray(counts, dtype=np.int64)
    if tokens.size and (tokens.min() < 0 or tokens.sum() > np.iinfo(np.int32).max):
        raise ValueError(f"token counts are {list(counts)}; each must be 0 or more, and the sum less than 2^31")
    begins = np.concatenate([[0], np.cumsum(tokens)])
    tiles = -(-tokens // rows)
    expert = np.repeat(np.arange(tokens.size), tiles)
    first = np.repeat(np.cumsum(tiles) - tiles, tiles)
    begin = begins[expert] + (np.arange(expert.size) - first) * rows
    table = to_device(np.stack([expert, begin, begins[expert + 1]]).astype(np.int32), device)
    return RowTiles(table[0], table[1], table[2])


def offsets(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the first row of each expert and the end of the last, int64 ``[E + 1]`` on ``device``."""
    return _numbers((0, *itertools.accumulate(counts)), device, _stream(device))


def counts_of_active(counts: Sequence[int], active: Sequence[bool] | None) -> list[int]:
    """Return the token count of each active expert, and 0 for each frozen one. ``active`` None: all frozen."""
    if active is None:
        return [0] * len(counts)
    return [count if is_active else 0 for count, is_active in zip(counts, active, strict=True)]


def addresses(
    what: str, tensors: Sequence[torch.Tensor | None], device: torch.device, multiple: int = 16
) -> torch.Tensor:
    """Return the address of each tensor, int64 ``[E]`` on ``device``; 0 for None.

    Args:
        what: the tensors' name in an error.
        tensors: one tensor of each expert.
        device: device on which kernels read the table.
        multiple: alignment in bytes, which the kernels' loads assume.

    Raises:
        ValueError: a tensor is not aligned.
    """
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    for expert, pointer in enumerate(pointers):
        if pointer % multiple:
            raise ValueError(f"{what} {expert} is at {pointer:#x}; the address must be a multiple of {multiple} bytes")
    return _numbers(pointers, device, _stream(device))


@functools.lru_cache(maxsize=TABLES)
def _numbers(values: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def to_device(table: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a small table to the device, in the order of the current stream; the host does not wait."""
    return torch.from_numpy(table).to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    """Return the current stream. A cached table is written, read and freed in the order of one stream."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
