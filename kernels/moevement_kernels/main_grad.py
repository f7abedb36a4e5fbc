"""Choice of the tensors that receive weight gradients: Megatron's FP32 ``main_grad``, or new tensors for autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients_of(weights: Sequence[Tensor], compute: Callable[[list[Tensor], bool], None]) -> list[Tensor]:
    """Compute the gradients of active weights, as Megatron's linear layers do, and return them for autograd.

    If all weights set ``fuse_weight_gradient``, ``compute`` adds the gradients to their FP32 ``main_grad``. The
    returned tensors then have no meaningful values.

    Args:
        weights: weights that require gradients.
        compute: function whose first argument is a list with an FP32 tensor for each weight. It adds the gradients to
            these tensors if its second argument is True, and overwrites the tensors otherwise.
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
    """Return True if the weight asks for sums in its ``main_grad``, and ``main_grad`` is FP32, as kernels need it.

    Megatron's ``main_grad`` has 16 bits if ranks reduce gradients in 16 bits.
    """
    return bool(getattr(weight, "fuse_weight_gradient", False)) and weight.main_grad.dtype == torch.float32


def _main_grad(weight: Any) -> Tensor:
    gradient: Tensor = weight.main_grad
    return gradient


def _fp32(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
