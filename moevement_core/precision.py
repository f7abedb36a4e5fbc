"""Precision regimes: number formats of compute weights, master weights and moments, and the bytes of state in them.

Only planning uses this module. A training run measures its tensors (:func:`moevement_core.operators.tensor_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from moevement_core.errors import ConfigError
from moevement_core.operators import StateBytes


class Scaling(StrEnum):
    """Kind of scales of FP8 numbers."""

    TENSOR = "tensor"
    """Scales that are FP32 factors, one for each tensor (delayed or current scaling)."""
    BLOCK = "block"
    """Scales that are FP32 factors, one for each block of 128 x 128 elements of a weight."""
    MX = "mx"
    """Scales of MXFP8, which are exponents of one byte: one for 32 elements of a row, and one for 32 of a column."""


_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_SCALED = {"fp16", "fp8"}
"""Formats of master weights and moments that have an FP32 scale for each tensor."""
_BLOCK = 128
_FACTOR_BYTES = 4


class TensorShape(NamedTuple):
    """Size of a parameter tensor, from which its bytes in each number format are computed."""

    elements: int
    rows: int = 0
    """Rows of a linear layer's weight in a transformer layer; 0 for parameters that FP8 recipes do not quantise."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Number formats of a training run (the columns of MoEvement's table 7), and the kind of scales of FP8 numbers.

    If ``compute`` is FP8, only linear layers have FP8 weights. Norms, routers, embedding and head stay in BF16.
    """

    compute: str
    master: str
    first_moment: str
    second_moment: str
    scaling: Scaling = Scaling.TENSOR
    gradient: str = "fp32"
    """Format of the reduced gradients that ranks log for redo. In Megatron with ``--bf16``, they are FP32."""
    step_bytes: int = 0
    """Bytes of a step counter for each tensor; torch's Adam has such counters, other optimizers have none."""

    def __post_init__(self) -> None:
        for name in (self.compute, self.master, self.first_moment, self.second_moment, self.gradient):
            if name not in _ELEMENT_BYTES:
                raise ConfigError(f"precision {name!r}; needs one of {', '.join(_ELEMENT_BYTES)}")

    def __str__(self) -> str:
        return f"{self.compute}/{self.master}/{self.first_moment}+{self.second_moment}".upper()

    @property
    def is_narrow(self) -> bool:
        """True if any of master weights and moments is not FP32, which needs ``--use-precision-aware-optimizer``."""
        return {self.master, self.first_moment, self.second_moment} != {"fp32"}

    @property
    def keeps_fp8(self) -> bool:
        """True if compute weights of linear layers are stored in FP8, in separate buffers."""
        return self.compute == "fp8"

    def state_bytes(self, tensors: Sequence[TensorShape], shards: int = 1) -> StateBytes:
        """Return an estimate of an operator's bytes on each of the ``shards`` ranks that share the operator evenly.

        Args:
            tensors: all tensors of the operator.
            shards: number of ranks that each hold an equal part (Megatron's distributed optimizer). The size of a part
                is rounded up.
        """
        elements = math.ceil(sum(tensor.elements for tensor in tensors) / shards)
        quantised = math.ceil(sum(tensor.elements for tensor in tensors if self.quantises(tensor)) / shards)
        owned = math.ceil(len(tensors) / shards)
        return self._weigh(elements, quantised, owned, sum(map(self.scale_bytes, tensors)))

    def part_bytes(self, parts: Iterable[tuple[TensorShape, int]]) -> StateBytes:
        """Return the exact bytes of an operator's state that a rank saves.

        Args:
            parts: pairs of a tensor of the operator and the number of its elements that the rank owns. If the rank owns
                no element of a tensor, the rank still saves the tensor's scales, in snapshots of the compute weights
                and in snapshots of the full state.
        """
        elements = quantised = tensors = scales = full_scales = 0
        for tensor, owned in parts:
            tensor_scales = self.scale_bytes(tensor)
            elements, tensors, scales = elements + owned, tensors + (owned > 0), scales + tensor_scales
            quantised += owned if self.quantises(tensor) else 0
            full_scales += tensor_scales if not owned else 0
        return self._weigh(elements, quantised, tensors=tensors, scales=scales, full_scales=full_scales)

    def quantises(self, tensor: TensorShape) -> bool:
        """Return True if snapshots save a tensor's compute weights in FP8.

        The result is False for MXFP8: snapshots then save BF16 weights, from which training computes the FP8 weights
        along rows and those along columns.
        """
        return self.keeps_fp8 and tensor.rows > 0 and self.scaling is not Scaling.MX

    def scale_bytes(self, tensor: TensorShape) -> int:
        """Return the bytes of the scales of a tensor's compute weights.

        A rank that has only a part of the tensor still has all of these scales.
        """
        if not self.quantises(tensor):
            return 0
        if self.scaling is Scaling.TENSOR:
            return _FACTOR_BYTES
        return _FACTOR_BYTES * math.ceil(tensor.rows / _BLOCK) * math.ceil(tensor.elements / tensor.rows / _BLOCK)

    def _weigh(self, elements: int, quantised: int, tensors: int, scales: int, full_scales: int = 0) -> StateBytes:
        """Return the bytes of an operator's state on one rank.

        Args:
            elements: number of elements that the rank owns.
            quantised: number of owned elements whose compute weights are FP8.
            tensors: number of tensors that have elements on the rank.
            scales: bytes of scales of compute weights.
            full_scales: bytes of scales of tensors of which the rank owns no element. Snapshots of the full state hold
                these scales, too, so they count as full state.
        """
        plain = "bf16" if self.keeps_fp8 else self.compute
        compute = quantised + (elements - quantised) * _ELEMENT_BYTES[plain] + scales
        master, first, second = (
            elements * _ELEMENT_BYTES[name] + (tensors * _FACTOR_BYTES if name in _SCALED else 0)
            for name in (self.master, self.first_moment, self.second_moment)
        )
        optimizer = first + second + tensors * self.step_bytes + full_scales
        return StateBytes(
            compute=compute,
            master=max(master, compute - optimizer),
            optimizer=optimizer,
            gradient=elements * _ELEMENT_BYTES[self.gradient],
        )


MIXED = Regime("bf16", "fp32", "fp32", "fp32")
"""Mixed precision, the default. Each element has 2 bytes of compute weights (BF16 or FP16), and 12 bytes of FP32 master
weights and moments."""

TABLE_7 = (
    Regime("fp16", "fp16", "fp16", "fp16"),
    Regime("fp8", "fp32", "fp32", "fp32"),
    Regime("fp8", "fp16", "fp32", "fp32"),
    Regime("fp8", "fp16", "fp8", "fp16"),
    Regime("fp8", "fp8", "fp8", "fp16"),
)
"""Rows of MoEvement's table 7, in its order."""

PRESETS: dict[str, Regime] = {
    "mixed": MIXED,
    "fp32": Regime("fp32", "fp32", "fp32", "fp32"),
    **{f"table7-row{row}": regime for row, regime in enumerate(TABLE_7, start=1)},
}


def parse(text: str, scaling: Scaling = Scaling.TENSOR) -> Regime:
    """Return the regime that a text names.

    The text is a preset's name, or ``compute/master/first+second`` as in table 7, such as ``FP8/FP16/FP8+FP16``.

    Raises:
        ConfigError: the text has neither form.
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
    return replace(chosen, scaling=scaling)
