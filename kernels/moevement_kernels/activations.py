"""Activations of an expert and their derivatives in FP32; they specify what the kernels compute."""

from __future__ import annotations

import math
from enum import StrEnum

import torch


class Activation(StrEnum):
    """Activation functions, which an expert applies between its two weight matrices.

    A gated function activates the first half of its input, and multiplies the result by the second half.
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GELU = "gelu"
    """GELU with the error function, which is torch's default."""
    RELU = "relu"
    SQUARED_RELU = "squared_relu"

    @property
    def is_gated(self) -> bool:
        """True if the activation is gated, so that the first weight has twice the rows of a plain expert."""
        return self in (Activation.SWIGLU, Activation.GEGLU)


def activate(kind: Activation, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of FP32 values of any shape. For gated activations, ``x`` is only the gate."""
    match kind:
        case Activation.SWIGLU:
            return x * torch.sigmoid(x)
        case Activation.GEGLU | Activation.GELU:
            return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
        case Activation.RELU:
            return x.clamp_min(0)
        case Activation.SQUARED_RELU:
            return x.clamp_min(0).square()


def derivative(kind: Activation, x: torch.Tensor) -> torch.Tensor:
    """Return the derivative of :func:`activate`; 0 where the derivative of ReLU is undefined."""
    match kind:
        case Activation.SWIGLU:
            sigmoid = torch.sigmoid(x)
            return sigmoid * (1 + x * (1 - sigmoid))
        case Activation.GEGLU | Activation.GELU:
            below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
            return below + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        case Activation.RELU:
            return (x > 0).to(x.dtype)
        case Activation.SQUARED_RELU:
            return 2 * x.clamp_min(0)
