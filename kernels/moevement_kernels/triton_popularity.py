"""The body of the popularity count, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_kernel(routed, probabilities, hard, soft, tokens, experts, BT: tl.constexpr, BE: tl.constexpr):
    """Sums of a block of rows, for a block of experts: int32 and FP32 ``[blocks, E]``."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    columns = tl.program_id(1) * BE + tl.arange(0, BE)
    place = rows[:, None] * experts + columns[None, :]
    inside = (rows < tokens)[:, None] & (columns < experts)[None, :]
    is_routed = tl.load(routed + place, mask=inside, other=0).to(tl.int32)
    probability = tl.load(probabilities + place, mask=inside, other=0).to(tl.float32)
    out = tl.program_id(0).to(tl.int64) * experts + columns
    tl.store(hard + out, tl.sum(is_routed, 0), mask=columns < experts)
    tl.store(soft + out, tl.sum(probability, 0), mask=columns < experts)
