"""Which implementation runs."""

from __future__ import annotations

import os
from enum import StrEnum
from importlib.util import find_spec

import torch


class Backend(StrEnum):
    """Of the grouped MLP."""

    REFERENCE = "reference"
    TRITON = "triton"
    CUDA = "cuda"
    """Triton, and the grouped input gradient in CUDA C++ for compute capability 9.0."""


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, as tests do (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels can work on ``tensor`` where it is."""
    return find_spec("triton") is not None and (tensor.is_cuda or is_interpreted())


def why_reference() -> str | None:
    """Why the reference runs in this process, in words; None where kernels do."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available() and not is_interpreted():
        return "there is no GPU"
    return None
