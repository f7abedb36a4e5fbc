"""What the bits of a result depend on beside the program and its settings: the processor and its libraries.

Windows on disk outlive the machines that wrote them. Iterations that are replayed on another kind of processor, or with
another version of a library, come to other last bits than those that were lost, and nothing is wrong with them.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Lines of /proc/cpuinfo, of x86-64 and of Arm: a model's name is empty or the same for many in virtual machines."""


def arithmetic() -> str:
    """Of this process, in words; two processes with the same come to the same bits."""
    library = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {library}"
        return f"{torch.cuda.get_device_name()}, {libraries}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {capability}, {torch.get_num_threads()} threads, {library}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    found: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        found.setdefault(name.strip(), value.strip())
    return " ".join([platform.machine(), *(f"{name} {found[name]}" for name in _PROCESSOR if name in found)])
