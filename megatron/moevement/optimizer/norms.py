"""The norms that gradients are clipped by, as they are recorded and given back: the same kind of number, the same bits.

Megatron's norm is a Python double, with which the clip coefficient is double arithmetic; with Transformer Engine it is
an FP32 tensor on the device, and the coefficient is FP32 arithmetic. One in place of the other gives others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Norm = float | torch.Tensor | None
"""A double, an FP32 tensor, or none where there was no update."""


def recorded(norm: Any) -> Norm:
    """``norm`` as it is kept: a tensor as a copy on the host, of its own shape and dtype, anything else as a double.

    Waits for the device, and so for the reduction that the norm came of. Hence not to be called in a section in which
    nothing may wait for another rank.
    """
    if isinstance(norm, torch.Tensor):
        return norm.detach().to("cpu", copy=True)
    return None if norm is None else float(norm)


def all_recorded(norms: Mapping[str, Any] | None) -> dict[str, Norm]:
    """:func:`recorded` of each."""
    return {name: recorded(norm) for name, norm in (norms or {}).items()}


def as_clipped_by(norm: Norm) -> Any:
    """The inverse of :func:`recorded`: a tensor is a new one on this rank's device."""
    if isinstance(norm, torch.Tensor):
        return norm.to(torch.cuda.current_device(), copy=True)
    return norm


def as_logged(norm: Norm) -> float | None:
    """Return the norm as Megatron's trainer logs it: rounded to FP32 on the way between stages."""
    return None if norm is None else torch.as_tensor(norm, dtype=torch.float32).item()
