"""Small odd problems for the grouped expert MLP, and the choice of the cases that every test run executes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from moevement_kernels.activations import Activation
from moevement_kernels.tiles import Tiles
from moevement_kernels.weights import Weights

SMALL = Tiles(rows=16, columns=16, inner=16, warps=4, stages=2)
"""Tiles so small that odd sizes need several of them."""
WIDE = Tiles(rows=16, columns=64, inner=64, warps=4, stages=2)
"""Wider tiles for many experts; the interpreter is slow, and they need fewer programs."""
COUNTS = {
    "ragged": [5, 0, 33, 1, 17],
    "one token": [0, 1, 0],
    "one expert": [20],
    "first and last empty": [0, 9, 16, 0],
    "many": [number % 3 for number in range(128)],
    "none": [0, 0],
}


@dataclass
class Problem:
    """Random tokens ``[T, 40]`` and the weights of experts with 24 inner features."""

    kind: Activation
    counts: list[int]
    dtype: torch.dtype = torch.float32
    seed: int = 5

    hidden = 40
    inner = 24

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(self.dtype)

        tokens, rows = sum(self.counts), self.inner * (2 if self.kind.is_gated else 1)
        self.x, self.dy = normal(tokens, self.hidden), normal(tokens, self.hidden)
        self.p = torch.rand(tokens, generator=draw)
        self.w1 = [normal(rows, self.hidden) / 4 for _ in self.counts]
        self.w2 = [normal(self.hidden, self.inner) / 4 for _ in self.counts]

    @property
    def weights(self) -> tuple[Weights, Weights]:
        return Weights(self.w1), Weights(self.w2)


def first_names(quick: Collection[tuple[Any, ...]], *values: Collection[Any]) -> list[Any]:
    """Return all combinations of values as parameters; those that are not in ``quick`` are for the exhaustive run."""
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.full) for case in product(*values)]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check equality up to rounding: FP32 sums may have another order, and BF16 results may be neighbouring values."""
    error = 2**-7 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        actual, expected, rtol=error, atol=error * float(expected.abs().max() if expected.numel() else 0)
    )
