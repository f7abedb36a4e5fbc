"""Choice of the backend that runs the grouped MLP."""

from __future__ import annotations

import os
from enum import StrEnum
from importlib.util import find_spec

import torch


class Backend(StrEnum):
    """Backends of the grouped MLP."""

    REFERENCE = "reference"
    TRITON = "triton"
    CUDA = "cuda"
    """Triton, except that GPUs of compute capability 9.0 compute the grouped input gradient in CUDA C++."""


_selected = Backend.TRITON


def select(backend: Backend) -> None:
    """Select the backend for tensors on a GPU, in this process from now on.

    A replay needs the backend of the original iterations, because other kernels may round differently.
    """
    global _selected
    _selected = backend


def selected() -> Backend:
    """Return the selected backend; Triton if :func:`select` has not been called."""
    return _selected


def is_interpreted() -> bool:
    """Return True if Triton runs kernels on the CPU, as tests do (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return True if kernels process ``tensor``, and False if the reference in PyTorch does."""
    if _selected is Backend.REFERENCE or find_spec("triton") is None:
        return False
    return tensor.is_cuda or is_interpreted()


def why_reference() -> str | None:
    """Return the reason why this process cannot run kernels; None if it can.

    Such a process runs the reference in PyTorch. The result does not depend on which backend is selected.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available() and not is_interpreted():
        return "there is no GPU"
    return None
