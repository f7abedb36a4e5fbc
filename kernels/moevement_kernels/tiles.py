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

ALIGNMENT = 16
"""Number of bytes of which the addresses of weights and gradients are multiples."""
TABLES = 2048
"""Largest number of cached tables in each of two caches: tables of row tiles, and tables of addresses and offsets.

A table takes a few KB of device memory. Tables of addresses must stay in their cache for the whole training run. Tables
that depend on token counts must stay from the forward pass of a micro-batch to its backward pass.
"""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the work of a Triton program: rows and columns of its tile, and elements of the sum that a step adds."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3


def tiles_of(dtype: torch.dtype, *, two_products: bool = False) -> Tiles:
    """Return sizes with which a program fits into shared memory and registers.

    The sizes depend only on the arguments, so programs add in the same order in every run.

    Args:
        dtype: dtype of the tokens.
        two_products: True if a program computes two products, as for both halves of a gated expert's first weight.
    """
    if dtype == torch.float32:
        return Tiles(columns=32 if two_products else 64, inner=32)
    return Tiles(columns=64 if two_products else 128)


@dataclass(frozen=True)
class RowTiles:
    """Tiles of all experts: tensors on the device with an int32 number for each tile."""

    expert: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    """First row after the expert's rows. A tile may end before this row."""

    @property
    def count(self) -> int:
        """Number of tiles of all experts."""
        return self.expert.numel()


def row_tiles(counts: Sequence[int], rows: int, device: torch.device) -> RowTiles:
    """Return the tiles of ``rows`` rows for ``counts`` tokens of each expert. Experts without tokens have no tiles.

    The result is cached, so a forward pass, its recomputation and its backward pass use one copy on the device.

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
    """Return the first row of each of E experts, and then the number of all rows, int64 ``[E + 1]`` on ``device``."""
    return _numbers((0, *itertools.accumulate(counts)), device, _stream(device))


def counts_of_active(counts: Sequence[int], active: Sequence[bool] | None) -> list[int]:
    """Return the token count of each active expert, and 0 for each frozen one. ``active`` None: all frozen."""
    if active is None:
        return [0] * len(counts)
    return [count if is_active else 0 for count, is_active in zip(counts, active, strict=True)]


def addresses(what: str, tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return the address of each expert's tensor as int64 on ``device``; 0 for None.

    Loads of the kernels rely on addresses that are multiples of ``ALIGNMENT`` bytes.

    Args:
        what: name of the tensors in the message of an error.
        tensors: a tensor or None for each expert.
        device: device on which kernels read the addresses.

    Raises:
        ValueError: a tensor is not aligned.
    """
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    for expert, pointer in enumerate(pointers):
        if pointer % ALIGNMENT:
            raise ValueError(
                f"{what} of expert {expert} is at {pointer:#x}; the address must be a multiple of {ALIGNMENT} bytes"
            )
    return _numbers(pointers, device, _stream(device))


@functools.lru_cache(maxsize=TABLES)
def _numbers(values: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def to_device(table: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a small table to the device, on the current stream; the host does not wait."""
    return torch.from_numpy(table).to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    """Return the number of the current stream, which is part of each cache key.

    So the write, the reads and the release of a cached table are on one stream, which keeps them in order.
    """
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
