"""Choice of the implementation that runs."""

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
    """Triton, and the grouped input gradient in CUDA C++ for compute capability 9.0."""


_selected = Backend.TRITON


def select(backend: Backend) -> None:
    """Select what runs where tensors are on a GPU, from now on in this process; normal training and
    replay need the same.
    """
    global _selected
    _selected = backend


def selected() -> Backend:
    """Return the selected backend; Triton before any selection."""
    return _selected


def is_interpreted() -> bool:
    """Return whether Triton runs kernels on the CPU, as tests do (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels can work on ``tensor`` where it is."""
    if _selected is Backend.REFERENCE or find_spec("triton") is None:
        return False
    return tensor.is_cuda or is_interpreted()


def why_reference() -> str | None:
    """Why the reference runs in this process, in words; None where kernels do."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available() and not is_interpreted():
        return "there is no GPU"
    return None
