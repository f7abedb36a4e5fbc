"""Processor and libraries, on which the bits of a result depend beside the program and its settings.

Windows on disk outlive the machines that wrote them. Iterations that are replayed on another kind of processor, or with
another version of a library, come to other last bits than those that were lost, and nothing is wrong with them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Lines of /proc/cpuinfo, of x86-64 and of Arm: a model's name is empty or the same for many in virtual machines."""
_GPU_LIBRARIES = ("transformer-engine", "triton", "apex")
"""Distributions whose kernels a model may run on a GPU."""
_SUMS_ON_GPUS = ("NCCL_ALGO", "NCCL_PROTO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables by which libraries choose the order of sums."""


def arithmetic() -> str:
    """Return what bits depend on in this process, in words; two processes with the same come to the same bits.

    On GPUs that holds only where computations are repeatable (:func:`is_repeatable`) and, for sums over ranks, where
    these are in the same places (:func:`sums_follow_places`).
    """
    library = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {_nccl()}{library}"
        return ", ".join([torch.cuda.get_device_name(), libraries, *_versions(_GPU_LIBRARIES), *_chosen()])
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {capability}, {torch.get_num_threads()} threads, {library}"


def is_repeatable() -> bool:
    """Return whether this process comes to the same bits when it repeats a computation on the same device.

    On a CPU it does. On a GPU some kernels add in no fixed order unless torch was told to use deterministic ones.
    """
    return not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled()


def sums_follow_places() -> bool:
    """Return whether the order of sums over ranks follows their nodes and devices: in NCCL it does, in gloo not."""
    return torch.cuda.is_available()


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return ""
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "


def _versions(distributions: tuple[str, ...]) -> list[str]:
    """Return name and version of those that are installed."""
    installed = []
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    return installed


def _chosen() -> list[str]:
    """Return by what this process chooses the order of its sums."""
    deterministic = "deterministic" if is_repeatable() else "not deterministic"
    return [deterministic, *(f"{name}={os.environ[name]}" for name in _SUMS_ON_GPUS if name in os.environ)]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    fields: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        fields.setdefault(name.strip(), value.strip())
    return " ".join([platform.machine(), *(f"{name} {fields[name]}" for name in _PROCESSOR if name in fields)])
