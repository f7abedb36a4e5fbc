"""FP8 weights in the form in which snapshots store them: raw buffers with names, without conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class RawBuffer(Protocol):
    """Interface of a buffer whose size is known; ``torch.Tensor`` has it."""

    def numel(self) -> int: ...  # noqa: D102

    def element_size(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedBuffers[Buffer: RawBuffer]:
    """Buffers of one weight in FP8.

    Attributes:
        codes: one byte for each element, in the order of the elements. A rank that owns elements ``a`` to ``b``
            therefore saves bytes ``a`` to ``b``.
        scales: factors by which the codes are multiplied, by name. A rank that owns any element saves all of them.
        others: buffers of a second FP8 form of the weight (MXFP8 by columns), by name. They cannot be computed from
            ``codes``.
    """

    codes: Buffer
    scales: Mapping[str, Buffer]
    others: Mapping[str, Buffer]

    @property
    def all(self) -> dict[str, Buffer]:
        """Buffers with codes, with scales, and of a second FP8 form, by name."""
        return {"codes": self.codes, **self.scales, **self.others}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.all.values())

    @property
    def is_one_form(self) -> bool:
        """True if codes and scales are the only buffers, so that they suffice to restore the weight."""
        return not self.others
