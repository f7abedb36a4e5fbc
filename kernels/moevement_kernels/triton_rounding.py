"""Rounding from FP32 to a narrower dtype: to the nearest value, ties to even, also under Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from moevement_kernels.backend import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Return ``x.to(DTYPE)``, rounded to the nearest value.

    Triton's interpreter only cuts off bits when it converts to BF16, so this function rounds before the conversion.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)
