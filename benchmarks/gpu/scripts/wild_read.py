"""Triton kernel that reads far out of bounds."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _read(values: Any, distance: Any) -> None:
    tl.store(values, tl.load(values + distance))


def wild_read() -> None:
    """Launch the kernel. The error appears at the next synchronization."""
    _read[(1,)](torch.zeros(1, device="cuda"), 1 << 44)
