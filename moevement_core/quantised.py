"""Weights in FP8 as snapshots see them: named raw buffers, never converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class RawBuffer(Protocol):
    """Buffer of which only the size is needed; ``torch.Tensor`` is one."""

    def numel(self) -> int: ...  # noqa: D102

    def element_size(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedBuffers[Buffer: RawBuffer]:
    """Buffers of a weight in FP8.

    Attributes:
        codes: one byte for each element of the weight, in its order, so that a range of the weight is one of them.
        scales: by name; what codes are to be multiplied with. They belong to the whole weight.
        others: by name; what is made from the same numbers in another way, and not from these codes.
    """

    codes: Buffer
    scales: Mapping[str, Buffer]
    others: Mapping[str, Buffer]

    @property
    def all(self) -> dict[str, Buffer]:
        """Every buffer by its name."""
        return {"codes": self.codes, **self.scales, **self.others}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.all.values())

    @property
    def is_one_form(self) -> bool:
        """True if codes and scales are all there is, so that the weight can be restored from them."""
        return not self.others
