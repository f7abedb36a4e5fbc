"""Rounding from FP32 to a narrower dtype, to the nearest and ties to even, also under Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from moevement_kernels.backend import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Return ``x.to(DTYPE)`` with correct rounding.

    Triton's interpreter truncates to BF16, so the value is rounded before the conversion.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)
