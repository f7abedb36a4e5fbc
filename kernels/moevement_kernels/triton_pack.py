"""The body of the snapshot pack, in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moevement_kernels.triton_rounding import narrow


def triton_dtype(dtype: torch.dtype) -> Any:
    """What holds the bits: floating point where it is cast, an integer of the same size elsewhere."""
    named = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return named.get(dtype) or {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}[dtype.itemsize]


@triton.jit
def pack_kernel(
    address, buffer, target, place, left, sums,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, ITEM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Bring a chunk to its place in the buffer, and sum the mixed words of its elements."""
    program = tl.program_id(0)
    index = tl.arange(0, CHUNK)
    here = index < tl.load(left + program)
    values = tl.load(tl.load(address + program).to(tl.pointer_type(SOURCE)) + index, mask=here, other=0)
    values = narrow(values, TARGET) if SOURCE == tl.float32 else values.to(TARGET)
    if ITEM == 4:
        bits = values.to(tl.uint32, bitcast=True)
        tl.store((buffer + tl.load(target + program)).to(tl.pointer_type(tl.uint32)) + index, bits, mask=here)
    elif ITEM == 2:
        bits = values.to(tl.uint16, bitcast=True)
        tl.store((buffer + tl.load(target + program)).to(tl.pointer_type(tl.uint16)) + index, bits, mask=here)
    else:
        bits = values.to(tl.uint8, bitcast=True)
        tl.store(buffer + tl.load(target + program) + index, bits, mask=here)
    number = (tl.load(place + program) + index + 1).to(tl.uint64)
    words = bits.to(tl.uint64) ^ (number * 0x9E3779B97F4A7C15)
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    words = tl.where(here, words ^ (words >> 31), 0)
    tl.store(sums + program, tl.sum(words.to(tl.int64), 0))
