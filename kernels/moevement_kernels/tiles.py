"""Which rows each program of a grouped kernel works on.

Tokens of an expert stand together. Its rows are cut into tiles of BM from its first row on, so that a tile has rows of
one expert only, and its results do not depend on what other experts do: that is what makes mixed frozen and active
experts equal to all-active ones, bit for bit.

With 5 and 3 tokens and BM = 4 the tiles begin at rows 0, 4 and 5 and end before rows 5, 5 and 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program's work: rows, columns, and how much of the inner dimension at a time."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3


def tiles_of(dtype: torch.dtype, *, two_products: bool = False) -> Tiles:
    """Sizes that fit into shared memory; they depend on nothing else, so that every run has the same sums.

    Args:
        dtype: of the tokens.
        two_products: whether a program has the same columns of two weights.
    """
    if dtype == torch.float32:
        return Tiles(columns=64, inner=32)
    return Tiles(columns=64 if two_products else 128)


@dataclass(frozen=True)
class RowTiles:
    """Of all experts, on the device: int32 ``[tiles]`` each."""

    expert: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    """Past the last row of the expert, not of the tile."""

    @property
    def count(self) -> int:
        """Of tiles."""
        return self.expert.numel()


def row_tiles(counts: Sequence[int], rows: int, device: torch.device) -> RowTiles:
    """Cut ``counts`` tokens of each expert into tiles of ``rows``; empty experts have none."""
    tokens = np.asarray(counts, dtype=np.int64)
    if tokens.size and (tokens.min() < 0 or tokens.sum() > np.iinfo(np.int32).max):
        raise ValueError(f"tokens of experts: {counts}; needs 0 or more each, and less than 2^31 together")
    begins = np.concatenate([[0], np.cumsum(tokens)])
    tiles = -(-tokens // rows)
    expert = np.repeat(np.arange(tokens.size), tiles)
    first = np.repeat(np.cumsum(tiles) - tiles, tiles)
    begin = begins[expert] + (np.arange(expert.size) - first) * rows
    table = np.stack([expert, begin, begins[expert + 1]]).astype(np.int32)
    on_device = torch.from_numpy(table).to(device, non_blocking=True)
    return RowTiles(on_device[0], on_device[1], on_device[2])


def offsets(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """The first row of each expert and the end of the last, int64 ``[E + 1]``."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])).to(device, non_blocking=True)


def addresses(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Where each tensor lies, int64 ``[E]``; 0 for None."""
    values = [0 if one is None else one.data_ptr() for one in tensors]
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
