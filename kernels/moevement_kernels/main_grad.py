"""Places for weight gradients: Megatron's FP32 ``main_grad``, or new tensors that autograd gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients_of(weights: Sequence[Tensor], compute: Callable[[list[Tensor], bool], None]) -> list[Tensor]:
    """Compute the gradients of active weights, as Megatron's linear layers do, and return them for autograd.

    If all weights set ``fuse_weight_gradient``, the gradients are added to their FP32 ``main_grad``.

    Args:
        weights: weights that require gradients.
        compute: function that writes the gradients into FP32 tensors, one for each weight, or, if its second argument
            is True, adds them to the tensors.
    """
    fuses = all(_fuses(weight) for weight in weights)
    into = [_main_grad(weight) if fuses else _fp32(weight) for weight in weights]
    compute(into, fuses)
    if not fuses:
        return [gradient.to(weight.dtype) for weight, gradient in zip(weights, into, strict=True)]
    for weight in weights:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Megatron's hooks need a gradient, but nothing reads its values.
    return [torch.empty_like(weight) for weight in weights]


def _fuses(weight: Any) -> bool:
    """Return True if the kernels can add to the weight's ``main_grad``, which has to be FP32.

    Megatron's ``main_grad`` has 16 bits if gradients are reduced in 16 bits.
    """
    return bool(getattr(weight, "fuse_weight_gradient", False)) and weight.main_grad.dtype == torch.float32


def _main_grad(weight: Any) -> Tensor:
    gradient: Tensor = weight.main_grad
    return gradient


def _fp32(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
