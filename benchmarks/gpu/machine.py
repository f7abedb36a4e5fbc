"""Description of the hardware and versions behind figures.

It runs in its own process, so that the calling process has no CUDA context.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

PACKAGES = ("torch", "triton", "megatron-core", "nvidia-resiliency-ext", "transformer-engine", "apex", "numpy")


def describe() -> dict[str, str]:
    """Return texts that describe hardware and versions, by name. ``devices`` is the number of GPUs."""
    facts = {"devices": "0", "GPUs": "none"}
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        facts = {"devices": str(len(names)), "GPUs": ", ".join(f"{names.count(name)} x {name}" for name in {*names})}
        properties = torch.cuda.get_device_properties(0)
        facts["memory of a GPU"] = f"{properties.total_memory / 2**30:.0f} GiB"
        facts["CUDA"], facts["cuDNN"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["driver"] = _driver()
    facts["host"] = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.release()}"
    facts["Python"] = platform.python_version()
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"
