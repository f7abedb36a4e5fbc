"""Storage of the weights of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weights:
    """Weight matrices of all experts for one layer.

    Args:
        data: weight ``[rows, columns]`` of each expert, contiguous, in the tokens' dtype.
    """

    data: Sequence[torch.Tensor]

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

    @property
    def rows(self) -> int:
        """Number of output features."""
        return int(self.data[0].shape[0])

    @property
    def columns(self) -> int:
        """Number of input features."""
        return int(self.data[0].shape[1])

    def dense(self, expert: int) -> torch.Tensor:
        """Return the weight of an expert as FP32, ``[rows, columns]``."""
        return self.data[expert].float()
