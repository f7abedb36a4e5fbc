"""Triton kernel that reads far out of bounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _read(values, distance):  # type: ignore[no-untyped-def]  # Triton takes annotations for names of the kernel
    tl.store(values, tl.load(values + distance))


def wild_read() -> None:
    """Launch the kernel. The error appears at the next synchronization."""
    _read[(1,)](torch.zeros(1, device="cuda"), 1 << 44)
