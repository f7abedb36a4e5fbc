"""Megatron's FP8 recipes: which dtype and which quantiser inputs, weights and gradients have."""

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
    """Roles of a matrix in a product; delayed scaling has a scale for each."""

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
    """Recipe from ``--fp8-format`` and the flags beside it."""

    name: str
    is_hybrid: bool
    """Gradients in E5M2, all else in E4M3."""
    margin: int = 0
    """Delayed: powers of two that are left free above the amax."""
    history: int = 1
    """Delayed: amaxes that are kept."""
    takes_max: bool = False
    """Delayed: the scale is from the largest amax that is kept, not from the last."""

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
        """Return the dtype of the codes."""
        return E5M2 if self.is_hybrid and role is Role.GRADIENT else E4M3

    def quantise(self, matrix: torch.Tensor, role: Role) -> Quantised:
        """``[M, N]`` by its own amaxes; not for delayed scaling."""
        quantiser = (_WEIGHTS if role is Role.WEIGHT else _ACTIVATIONS)[self.name]
        return quantiser(matrix, self.dtype(role))
