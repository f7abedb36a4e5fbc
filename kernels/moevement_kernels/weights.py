"""Storage of the weights of experts: in the dtype of the tokens, or as FP8 bytes with inverse scales.

FP8 has the layout of Transformer Engine: bytes of e4m3 values, and FP32 factors. A tensor has one factor, or a table of
factors for blocks of 128 x 128 elements. Rows of this table may be padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

BLOCK = 128


class Format(IntEnum):
    """Format of the weights of a layer. Kernels receive its number as a compile-time constant."""

    PLAIN = 0
    FP8_PER_TENSOR = 1
    FP8_PER_BLOCK = 2


@dataclass(frozen=True)
class Weights:
    """Weight matrices of all experts for one layer.

    Args:
        data: weight ``[rows, columns]`` of each expert, contiguous; in the tokens' dtype, or uint8 that holds e4m3.
        inverse_scales: FP32 factors of each expert's weight: ``[1]``, or at least
            ``[rows / 128, columns / 128]`` rounded up. None for weights in the tokens' dtype.
    """

    data: Sequence[torch.Tensor]
    inverse_scales: Sequence[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("there are no weights; give the weight of at least one expert")
        shape, dtype = self.data[0].shape, self.data[0].dtype
        for index, weight in enumerate(self.data):
            if weight.dim() != 2 or weight.shape != shape or weight.dtype != dtype:
                raise ValueError(
                    f"the weight of expert {index} is {tuple(weight.shape)} {weight.dtype}; it must be {tuple(shape)} "
                    f"{dtype}, like the weight of expert 0"
                )
            if not weight.is_contiguous():
                raise ValueError(f"the weight of expert {index} is not contiguous; give weight.contiguous()")
        if (dtype == torch.uint8) != (self.inverse_scales is not None):
            raise ValueError(
                f"weights are {dtype}, with inverse scales: {self.inverse_scales is not None}; give inverse scales for "
                "FP8 weights, which are uint8, and none for other weights"
            )
        if self.inverse_scales is not None:
            self._check_scales(self.inverse_scales)

    def _check_scales(self, scales: Sequence[torch.Tensor]) -> None:
        if len(scales) != len(self.data):
            raise ValueError(f"{len(scales)} inverse scales for {len(self.data)} experts; give one for each expert")
        rows, columns = (-(-size // BLOCK) for size in self.data[0].shape)
        for index, scale in enumerate(scales):
            fits = scale.numel() == 1 or (scale.dim() == 2 and scale.shape[0] >= rows and scale.shape[1] >= columns)
            if scale.dtype != torch.float32 or not fits or not scale.is_contiguous():
                raise ValueError(
                    f"inverse scales of expert {index} are {tuple(scale.shape)} {scale.dtype}; give contiguous "
                    f"float32: one number, or at least [{rows}, {columns}] for blocks of {BLOCK}"
                )

    @property
    def rows(self) -> int:
        """Number of output features."""
        return int(self.data[0].shape[0])

    @property
    def columns(self) -> int:
        """Number of input features."""
        return int(self.data[0].shape[1])

    @property
    def format(self) -> Format:
        """Format in which the weights are stored."""
        if self.inverse_scales is None:
            return Format.PLAIN
        return Format.FP8_PER_TENSOR if self.inverse_scales[0].numel() == 1 else Format.FP8_PER_BLOCK

    @property
    def scale_stride(self) -> int:
        """Number of scales in a row of the table of block scales; 0 for formats without such a table."""
        return int(self.inverse_scales[0].shape[1]) if self.format is Format.FP8_PER_BLOCK else 0  # type: ignore[index]

    def dense(self, expert: int) -> torch.Tensor:
        """Return the weight of an expert as FP32, ``[rows, columns]``."""
        data = self.data[expert]
        if self.inverse_scales is None:
            return data.float()
        values, scale = data.view(torch.float8_e4m3fn).float(), self.inverse_scales[expert]
        if scale.numel() == 1:
            return values * scale
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return values * scale[: self.rows, : self.columns]


@dataclass(frozen=True)
class E5M2:
    """Gradient in FP8 (E5M2).

    Args:
        data: bytes of e5m2 values in a uint8 tensor of any shape.
        inverse_scale: factor of all values, FP32 ``[1]``.
    """

    data: torch.Tensor
    inverse_scale: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Return the values as FP32."""
        return self.data.view(torch.float8_e5m2).float() * self.inverse_scale
