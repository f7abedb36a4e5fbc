"""Precision regimes: in which formats weights, master weights and moments stand, and what that weighs.

Planning only. A live run weighs the tensors that are there (:func:`moevement_core.operators.tensor_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moevement_core.errors import ConfigError
from moevement_core.operators import StateBytes


class Scaling(StrEnum):
    """How FP8 numbers get their scale."""

    TENSOR = "tensor"
    """One FP32 factor for a tensor (delayed or current scaling)."""
    BLOCK = "block"
    """One FP32 factor for 128 x 128 elements of a weight."""
    MX = "mx"
    """MXFP8: one exponent byte for 32 elements."""


_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_BLOCK_ELEMENTS, _MX_ELEMENTS = 128 * 128, 32


@dataclass(frozen=True, slots=True)
class Regime:
    """The formats of a training regime (the columns of MoEvement's table 7) and how FP8 numbers are scaled."""

    compute: str
    master: str
    first_moment: str
    second_moment: str
    scaling: Scaling = Scaling.TENSOR
    gradient: str = "fp32"
    """As gradients are reduced, in which form redo logs them; Megatron's are FP32 with ``--bf16``."""

    def __post_init__(self) -> None:
        for name in (self.compute, self.master, self.first_moment, self.second_moment, self.gradient):
            if name not in _ELEMENT_BYTES:
                raise ConfigError(f"precision {name!r}; needs one of {', '.join(_ELEMENT_BYTES)}")

    def __str__(self) -> str:
        return f"{self.compute}/{self.master}/{self.first_moment}+{self.second_moment}".upper()

    def state_bytes(self, tensors: Sequence[int], shards: int = 1) -> StateBytes:
        """What an operator weighs on one of the ``shards`` ranks that it is cut over.

        Args:
            tensors: elements of each of its tensors.
            shards: ranks that each hold an equal part (Megatron's distributed optimizer). The parts are rounded up.
        """
        return StateBytes(
            compute=self._bytes(self.compute, tensors, shards),
            master=self._bytes(self.master, tensors, shards),
            optimizer=self._bytes(self.first_moment, tensors, shards)
            + self._bytes(self.second_moment, tensors, shards),
            gradient=self._bytes(self.gradient, tensors, shards),
        )

    def _bytes(self, name: str, tensors: Sequence[int], shards: int) -> int:
        elements = math.ceil(sum(tensors) / shards)
        return elements * _ELEMENT_BYTES[name] + (self._scale_bytes(tensors, shards) if name == "fp8" else 0)

    def _scale_bytes(self, tensors: Sequence[int], shards: int) -> int:
        match self.scaling:
            case Scaling.TENSOR:  # a rank that holds a part of a tensor needs the tensor's one factor
                return 4 * len(tensors)
            case Scaling.BLOCK:
                return math.ceil(sum(4 * math.ceil(tensor / _BLOCK_ELEMENTS) for tensor in tensors) / shards)
            case Scaling.MX:
                return math.ceil(sum(math.ceil(tensor / _MX_ELEMENTS) for tensor in tensors) / shards)


MIXED = Regime("bf16", "fp32", "fp32", "fp32")
"""Mixed precision, the default: BF16 (or FP16) compute weights, FP32 master weights and moments: 2 and 12 bytes."""

TABLE_7 = (
    Regime("fp16", "fp16", "fp16", "fp16"),
    Regime("fp8", "fp32", "fp32", "fp32"),
    Regime("fp8", "fp16", "fp32", "fp32"),
    Regime("fp8", "fp16", "fp8", "fp16"),
    Regime("fp8", "fp8", "fp8", "fp16"),
)
"""The rows of MoEvement's table 7, in its order."""

PRESETS: dict[str, Regime] = {
    "mixed": MIXED,
    "fp32": Regime("fp32", "fp32", "fp32", "fp32"),
    **{f"table7-row{row}": regime for row, regime in enumerate(TABLE_7, start=1)},
}


def parse(text: str, scaling: Scaling = Scaling.TENSOR) -> Regime:
    """A preset's name, or ``compute/master/first+second`` as in table 7: ``FP8/FP16/FP8+FP16``.

    Raises:
        ConfigError: neither.
    """
    if text in PRESETS:
        chosen = PRESETS[text]
    else:
        parts = text.lower().replace("+", "/").split("/")
        if len(parts) != 4:
            raise ConfigError(
                f"regime {text!r}; needs one of {', '.join(PRESETS)}, or COMPUTE/MASTER/MOMENT+MOMENT such as "
                "FP8/FP16/FP8+FP16"
            )
        compute, master, first, second = parts
        chosen = Regime(compute, master, first, second)
    return Regime(chosen.compute, chosen.master, chosen.first_moment, chosen.second_moment, scaling, chosen.gradient)
