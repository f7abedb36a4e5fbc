"""Norms for gradient clipping. Records keep the type and the exact value of each norm.

Megatron's norm is a Python double, and the clip coefficient is computed in double arithmetic. With Transformer Engine,
the norm is an FP32 tensor on the device, and the coefficient is computed in FP32 arithmetic. A conversion between the
two types would change the clipped gradients in their last bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Norm = float | torch.Tensor | None
"""Norm of gradients, as a double or as an FP32 tensor; None if no norm was computed."""


def recorded(norm: Any) -> Norm:
    """Return ``norm`` as records keep it: a tensor as a copy on the host, any other number as a double.

    The copy has the tensor's shape and dtype. The call waits for the device, and so for the reduction that computes the
    norm. The caller must not be inside the update section, where no rank may wait for another.
    """
    if isinstance(norm, torch.Tensor):
        return norm.detach().to("cpu", copy=True)
    return None if norm is None else float(norm)


def all_recorded(norms: Mapping[str, Any] | None) -> dict[str, Norm]:
    """Return the result of :func:`recorded` for each norm, by its name."""
    return {name: recorded(norm) for name, norm in (norms or {}).items()}


def as_clipped_by(norm: Norm) -> Any:
    """Return a recorded norm in the form that clipping needs; a tensor is copied to this rank's device."""
    if isinstance(norm, torch.Tensor):
        return norm.to(torch.cuda.current_device(), copy=True)
    return norm


def as_logged(norm: Norm) -> float | None:
    """Return the norm as Megatron's trainer logs it: rounded to FP32, because stages send it to each other in FP32."""
    return None if norm is None else torch.as_tensor(norm, dtype=torch.float32).item()
