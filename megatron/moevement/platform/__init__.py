"""Support for Megatron on a machine without CUDA, all of it in this package.

Every process that runs Megatron's code (ranks, checkpoint writers, spawned data workers) calls ``install()`` once,
before it uses Megatron. With a GPU it does nothing. Without one, :mod:`.torch_cpu` implements ``torch.cuda`` for the
CPU, and :mod:`.megatron_cpu` adapts how Megatron uses the results.
"""

from __future__ import annotations

import os

import torch

from moevement_core.errors import ConfigError

PLATFORM_ENV = "MOEVEMENT_PLATFORM"
"""Variable that selects the platform: ``cpu`` forces the CPU, ``cuda`` refuses to start without a GPU; unset detects.
"""


def is_cpu() -> bool:
    """Return True if this process runs Megatron on the CPU."""
    wanted = os.environ.get(PLATFORM_ENV, "")
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"{PLATFORM_ENV}={wanted!r}: needs 'cpu' or 'cuda', or leave it unset")
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
