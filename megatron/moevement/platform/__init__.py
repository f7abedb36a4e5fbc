"""Support for Megatron on a machine without CUDA.

Every process that runs Megatron's code (ranks, checkpoint writers, spawned data workers) calls ``install()`` once,
before it uses Megatron. With a GPU, ``install()`` does nothing. Without a GPU, :mod:`.torch_cpu` implements
``torch.cuda`` for the CPU, and :mod:`.megatron_cpu` adapts Megatron to that implementation.
"""

from __future__ import annotations

import os

import torch

from moevement_core.errors import ConfigError

PLATFORM_ENV = "MOEVEMENT_PLATFORM"
"""Environment variable that selects the platform.

``cpu`` forces the CPU, and ``cuda`` refuses to start without a GPU. If the variable is unset, the process uses the GPU
if there is one.
"""


def is_cpu() -> bool:
    """Return True if this process runs Megatron on the CPU."""
    wanted = os.environ.get(PLATFORM_ENV, "")
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"{PLATFORM_ENV}={wanted!r}: the value must be 'cpu' or 'cuda'; or unset the variable")
    return wanted == "cpu" or (wanted == "" and not torch.cuda.is_available())


def install() -> bool:
    """Make Megatron usable in this process; idempotent.

    Returns:
        True if the machine has no CUDA and the replacements are installed, False if nothing had to be done.
    """
    if not is_cpu():
        return False
    from megatron.moevement.platform import torch_cpu

    torch_cpu.install()
    # Importing Megatron binds names of torch.cuda, so this comes after their replacement.
    from megatron.moevement.platform import megatron_cpu

    megatron_cpu.install()
    return True
