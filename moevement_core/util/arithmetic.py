"""Description of the processor and the libraries that determine the last bits of a result.

Windows on disk outlive the machines that wrote them. A replay on a different processor, or with a different library
version, gives results with different last bits. The recovery must then not report these bits as an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo that identify a processor, on x86-64 and on Arm. The list leaves out the model name, which
many virtual machines leave empty or set to one fixed text."""
_GPU_LIBRARIES = ("transformer-engine", "triton", "apex")
"""Python packages whose kernels a model may run on a GPU."""
_SUMS_ON_GPUS = ("NCCL_ALGO", "NCCL_PROTO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables that determine the order in which GPU libraries add numbers."""


def arithmetic() -> str:
    """Return a text that names everything in this process that determines the bits of results.

    Two processes with equal texts compute the same bits. On GPUs, two more conditions must be met: computations are
    repeatable (:func:`is_repeatable`), and ranks that sum together run on the same nodes and devices
    (:func:`sums_follow_places`).
    """
    library = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {_nccl()}{library}"
        return ", ".join([torch.cuda.get_device_name(), libraries, *_versions(_GPU_LIBRARIES), *_chosen()])
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {capability}, {torch.get_num_threads()} threads, {library}"


DETERMINISTIC, YES, NO = "deterministic", "yes", "no"
"""Entry of :func:`environment`: ``yes`` if torch uses deterministic algorithms."""
REQUIRED = ("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables that ``--deterministic-mode`` checks and sets."""
_VARIABLES = (
    *_SUMS_ON_GPUS, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
)  # fmt: skip
"""Environment variables on which the bits of results depend, on GPUs and on CPUs."""


def environment() -> dict[str, str]:
    """Return what determines the bits of results in this process, as a run's summary records it.

    The entries are ``arithmetic`` (:func:`arithmetic`), ``deterministic``, and each variable that is set.
    """
    deterministic = YES if torch.are_deterministic_algorithms_enabled() else NO
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {"arithmetic": arithmetic(), DETERMINISTIC: deterministic, **variables}


def is_repeatable() -> bool:
    """Return True if this process computes the same bits when it repeats a computation on the same device.

    CPUs always do so. On a GPU, some kernels add in no fixed order unless torch uses deterministic algorithms.
    """
    return not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled()


def sums_follow_places() -> bool:
    """Return True if the order of a sum over ranks depends on the nodes and devices of the ranks.

    The order depends on them with NCCL on GPUs, but not with gloo on CPUs.
    """
    return torch.cuda.is_available()


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return ""
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "


def _versions(distributions: tuple[str, ...]) -> list[str]:
    """Return the name and version of each of ``distributions`` that is installed."""
    installed = []
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    return installed


def _chosen() -> list[str]:
    """Return the settings of this process that determine the order of sums on a GPU."""
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
