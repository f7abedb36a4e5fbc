"""Megatron's FP8 recipes: the dtype and the quantiser of inputs, weights and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from megatron.moevement.fp8 import formats
from megatron.moevement.fp8.formats import E4M3, E5M2, Quantised

Quantiser = Callable[[torch.Tensor, torch.dtype], Quantised]


class Role(IntEnum):
    """Roles of a matrix in a product. Delayed scaling has one scale for each role."""

    INPUT = 0
    WEIGHT = 1
    GRADIENT = 2


_ACTIVATIONS: dict[str, Quantiser] = {
    "tensorwise": formats.by_tensor,
    "blockwise": formats.by_rows_and_columns,
    "mxfp8": formats.by_exponents,
}
_WEIGHTS: dict[str, Quantiser] = {**_ACTIVATIONS, "blockwise": formats.by_squares}
NAMES = ("delayed", *_ACTIVATIONS)
"""Values of ``--fp8-recipe``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """FP8 recipe that ``--fp8-format`` and related flags select."""

    name: str
    is_hybrid: bool
    """True if gradients are in E5M2 and all other matrices in E4M3; False if all are in E4M3."""
    margin: int = 0
    """Margin of delayed scaling, as a power of two: scales are divided by ``2**margin``."""
    history: int = 1
    """Number of amaxes that delayed scaling keeps."""
    takes_max: bool = False
    """True if delayed scaling uses the largest of the kept amaxes, False if it uses the newest."""

    @classmethod
    def of(cls, config: Any) -> Recipe:
        """Return the recipe of a ``TransformerConfig`` with ``fp8``."""
        name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
        return cls(
            name,
            config.fp8 == "hybrid",
            config.fp8_margin,
            config.fp8_amax_history_len,
            config.fp8_amax_compute_algo == "max",
        )

    @property
    def is_delayed(self) -> bool:
        """True if scales follow from earlier amaxes."""
        return self.name == "delayed"

    def dtype(self, role: Role) -> torch.dtype:
        """Return the dtype of the codes of a matrix in this role."""
        return E5M2 if self.is_hybrid and role is Role.GRADIENT else E4M3

    def quantise(self, matrix: torch.Tensor, role: Role) -> Quantised:
        """Quantise ``[M, N]`` with scales that are computed from this matrix; not for delayed scaling."""
        quantiser = (_WEIGHTS if role is Role.WEIGHT else _ACTIVATIONS)[self.name]
        return quantiser(matrix, self.dtype(role))
