"""Precision regimes: in which formats weights, master weights and moments stand, and what that weighs.

Planning only. A live run weighs the tensors that are there (:func:`moevement_core.operators.tensor_bytes`).
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
    """Kinds of scales of FP8 numbers."""

    TENSOR = "tensor"
    """Scale of one FP32 factor for a tensor (delayed or current scaling)."""
    BLOCK = "block"
    """Scale of one FP32 factor for 128 x 128 elements of a weight."""
    MX = "mx"
    """MXFP8: one exponent byte for 32 elements, along rows and along columns."""


_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_SCALED = {"fp16", "fp8"}
"""Formats of narrow state that has an FP32 scale for each tensor."""
_BLOCK = 128
_FACTOR_BYTES = 4


class TensorShape(NamedTuple):
    """A parameter as formats see it."""

    elements: int
    rows: int = 0
    """Rows of the weight of a linear layer in a transformer layer, which FP8 recipes quantise; 0 for anything else."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The formats of a training regime (the columns of MoEvement's table 7) and how FP8 numbers are scaled.

    Compute weights in FP8 are those of linear layers. Norms, routers, embedding and head are in BF16 beside them.
    """

    compute: str
    master: str
    first_moment: str
    second_moment: str
    scaling: Scaling = Scaling.TENSOR
    gradient: str = "fp32"
    """Format of reduced gradients, in which redo logs them; Megatron's are FP32 with ``--bf16``."""
    step_bytes: int = 0
    """Bytes of a step counter for each tensor, which torch's Adam has and others do not."""

    def __post_init__(self) -> None:
        for name in (self.compute, self.master, self.first_moment, self.second_moment, self.gradient):
            if name not in _ELEMENT_BYTES:
                raise ConfigError(f"precision {name!r}; needs one of {', '.join(_ELEMENT_BYTES)}")

    def __str__(self) -> str:
        return f"{self.compute}/{self.master}/{self.first_moment}+{self.second_moment}".upper()

    @property
    def is_narrow(self) -> bool:
        """True if an optimizer has to know about the formats of its state (``--use-precision-aware-optimizer``)."""
        return {self.master, self.first_moment, self.second_moment} != {"fp32"}

    @property
    def keeps_fp8(self) -> bool:
        """True if weights are kept in FP8, in buffers of their own."""
        return self.compute == "fp8"

    def state_bytes(self, tensors: Sequence[TensorShape], shards: int = 1) -> StateBytes:
        """Return the bytes of an operator on one of the ``shards`` ranks that it is cut over evenly.

        Args:
            tensors: all of it.
            shards: ranks that each hold an equal part (Megatron's distributed optimizer). The parts are rounded up.
        """
        elements = math.ceil(sum(tensor.elements for tensor in tensors) / shards)
        quantised = math.ceil(sum(tensor.elements for tensor in tensors if self.quantises(tensor)) / shards)
        held = math.ceil(len(tensors) / shards)
        return self._weigh(elements, quantised, held, sum(map(self.scale_bytes, tensors)))

    def part_bytes(self, parts: Iterable[tuple[TensorShape, int]]) -> StateBytes:
        """Return the bytes that a rank saves of an operator, exactly.

        Args:
            parts: its tensors, and how many elements of each the rank owns; of none it has the scales, in both.
        """
        elements = quantised = tensors = scales = alone = 0
        for tensor, owned in parts:
            its_scales = self.scale_bytes(tensor)
            elements, tensors, scales = elements + owned, tensors + (owned > 0), scales + its_scales
            quantised += owned if self.quantises(tensor) else 0
            alone += its_scales if not owned else 0
        return self._weigh(elements, quantised, tensors, scales, alone)

    def quantises(self, tensor: TensorShape) -> bool:
        """Return whether a tensor is saved as FP8 compute weights.

        Not with MXFP8, whose snapshots save what its two forms are made from: BF16.
        """
        return self.keeps_fp8 and tensor.rows > 0 and self.scaling is not Scaling.MX

    def scale_bytes(self, tensor: TensorShape) -> int:
        """Return the bytes of the scales of a tensor's compute weights; every rank has all of them, whichever part it
        owns.
        """
        if not self.quantises(tensor):
            return 0
        if self.scaling is Scaling.TENSOR:
            return _FACTOR_BYTES
        return _FACTOR_BYTES * math.ceil(tensor.rows / _BLOCK) * math.ceil(tensor.elements / tensor.rows / _BLOCK)

    def _weigh(self, elements: int, quantised: int, tensors: int, scales: int, alone: int = 0) -> StateBytes:
        """Return the bytes of a part of ``elements`` in several ``tensors``; ``alone`` are scales that are full state,
        too.
        """
        plain = "bf16" if self.keeps_fp8 else self.compute
        compute = quantised + (elements - quantised) * _ELEMENT_BYTES[plain] + scales
        master, first, second = (
            elements * _ELEMENT_BYTES[name] + (tensors * _FACTOR_BYTES if name in _SCALED else 0)
            for name in (self.master, self.first_moment, self.second_moment)
        )
        optimizer = first + second + tensors * self.step_bytes + alone
        return StateBytes(
            compute=compute,
            master=max(master, compute - optimizer),
            optimizer=optimizer,
            gradient=elements * _ELEMENT_BYTES[self.gradient],
        )


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
    return replace(chosen, scaling=scaling)
